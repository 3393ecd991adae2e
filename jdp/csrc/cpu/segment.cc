#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <thread>

#include "process.h"

namespace jdp {
namespace {

constexpr uint64_t kLayout = 0x6a647000'00000002;  // "jdp" and the version of what lies where
constexpr size_t kHeaderBytes = 4096;

enum Stopped : uint32_t { kRunning = 0, kUntold = 1, kTelling = 2, kTold = 3 };

size_t size_for(int num_ranks) { return kHeaderBytes + num_ranks * sizeof(Seat); }

std::string last_error(const std::string& what) { return what + ": " + std::strerror(errno); }

}  // namespace

struct Segment::Header {
  uint64_t layout;
  uint64_t nonce;
  int64_t num_ranks;
  // At byte 64, where anyone who can open the file may write 1 to end every wait.
  alignas(64) std::atomic<uint32_t> stopped;
  Code code;
  char message[1024];
};

int Segment::create(int num_ranks, uint64_t* nonce) {
  const int fd = memfd_create("jdp", MFD_CLOEXEC);
  if (fd < 0) return -1;
  void* memory = MAP_FAILED;
  if (getrandom(nonce, sizeof *nonce, 0) == sizeof *nonce &&
      ftruncate(fd, static_cast<off_t>(size_for(num_ranks))) == 0) {
    memory = mmap(nullptr, kHeaderBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (memory == MAP_FAILED) {
    const int error = errno;
    close(fd);
    errno = error;
    return -1;
  }
  // A new file is all zeros, which is what counters begin with.
  Header* header = static_cast<Header*>(memory);
  header->layout = kLayout;
  header->nonce = *nonce;
  header->num_ranks = num_ranks;
  munmap(memory, kHeaderBytes);
  return fd;
}

std::shared_ptr<Segment> Segment::attach(int pid, int fd, uint64_t nonce, int num_ranks,
                                         const std::vector<int>& local_ranks, std::string* why) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int own = pid == getpid() ? fd : open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (own < 0) return *why = last_error("cannot open " + path), nullptr;
  const size_t size = size_for(num_ranks);
  struct stat status;
  if (fstat(own, &status) != 0 || static_cast<size_t>(status.st_size) != size) {
    if (own != fd) close(own);
    return *why = path + " is not a segment for " + std::to_string(num_ranks) + " ranks", nullptr;
  }
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, own, 0);
  if (memory == MAP_FAILED) {
    *why = last_error("cannot map " + path);
    close(own);
    return nullptr;
  }
  std::shared_ptr<Segment> segment(new Segment(own, memory, size, local_ranks));
  const Header* header = static_cast<Header*>(memory);
  if (header->layout != kLayout || header->nonce != nonce) {
    return *why = path + " is another segment than was announced", nullptr;
  }
  const Process me = this_process();
  for (int rank : local_ranks) {
    const std::string failed = "cannot take the seat of rank " + std::to_string(rank) + ": ";
    if (rank < 0 || rank >= num_ranks) return *why = failed + "there is none", nullptr;
    Process owner = 0;
    if (me == 0) return *why = failed + "/proc/self/stat cannot be read", nullptr;
    if (!segment->seat(rank).owner.compare_exchange_strong(owner, me) && owner != me) {
      return *why = failed + "process " + std::to_string(pid_of(owner)) + " has it", nullptr;
    }
  }
  return segment;
}

Segment::Segment(int fd, void* memory, size_t size, std::vector<int> local_ranks)
    : fd_(fd), memory_(memory), size_(size), local_ranks_(std::move(local_ranks)) {}

Segment::~Segment() {
  munmap(memory_, size_);
  close(fd_);
}

int Segment::num_ranks() const {
  return static_cast<int>(static_cast<const Header*>(memory_)->num_ranks);
}

Seat& Segment::seat(int rank) {
  return reinterpret_cast<Seat*>(static_cast<std::byte*>(memory_) + kHeaderBytes)[rank];
}

bool Segment::is_local(int rank) const {
  return std::find(local_ranks_.begin(), local_ranks_.end(), rank) != local_ranks_.end();
}

bool Segment::is_gone(int rank) {
  const Process owner = seat(rank).owner.load();
  return owner != 0 && !is_local(rank) && has_ended(owner);
}

Status Segment::stop(const Status& why) {
  Header& header = *static_cast<Header*>(memory_);
  uint32_t running = kRunning;
  if (header.stopped.compare_exchange_strong(running, kTelling)) {
    header.code = why.code;
    std::snprintf(header.message, sizeof header.message, "%s", why.message.c_str());
    header.stopped.store(kTold);
    for (int rank = 0; rank < num_ranks(); ++rank) {
      Seat& peer = seat(rank);
      for (Counter* counter :
           {&peer.sent, &peer.reduced, &peer.mailbox.sent, &peer.mailbox.received}) {
        wake(*counter);
      }
    }
  }
  return why_stopped();
}

bool Segment::is_stopped() const {
  return static_cast<const Header*>(memory_)->stopped.load(std::memory_order_relaxed) != kRunning;
}

Status Segment::why_stopped() const {
  const Header& header = *static_cast<const Header*>(memory_);
  // Whoever tells may have been killed meanwhile.
  for (int i = 0; i < 100 && header.stopped.load() == kTelling; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (header.stopped.load() == kTold) return {header.code, header.message};
  return {Code::kAborted, "jdp: another process ended this communicator"};
}

}  // namespace jdp
