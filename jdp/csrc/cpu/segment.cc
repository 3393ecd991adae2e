#include "segment.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <thread>

#include "process.h"

namespace jdp {
namespace {

constexpr uint64_t kLayout = 0x6a647000'00000003;  // "jdp" and the version of the layout
constexpr size_t kHeaderBytes = 4096;

enum Stopped : uint32_t { kRunning = 0, kNoReason = 1, kWritingReason = 2, kReasonWritten = 3 };

size_t size_for(int num_ranks) { return kHeaderBytes + num_ranks * sizeof(Seat); }

std::string last_error(const std::string& what) { return what + ": " + std::strerror(errno); }

}  // namespace

struct Segment::Header {
  uint64_t layout;
  uint64_t nonce;
  int64_t num_ranks;
  // At byte 64. Any process that can open the file may write 1 here, which ends every wait.
  alignas(64) std::atomic<uint32_t> stopped;
  Code code;
  char message[1024];
  // `successor` is the nonce of the segment that replaces this one, or 0. A process may die while
  // it holds the lock and leave these fields half written, so `attach` checks them.
  pthread_mutex_t renewal;
  int32_t successor_pid;
  int32_t successor_fd;
  uint64_t successor;
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
  static_assert(sizeof(Header) <= kHeaderBytes, "seats start after the header");
  // A new file is all zeros, as the counters must be.
  Header* header = static_cast<Header*>(memory);
  header->layout = kLayout;
  header->nonce = *nonce;
  header->num_ranks = num_ranks;
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&header->renewal, &attributes);
  pthread_mutexattr_destroy(&attributes);
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
    return *why = path + " is not the announced segment: its nonce or layout version differs",
           nullptr;
  }
  const Process me = this_process();
  for (int rank : local_ranks) {
    const std::string failed = "cannot attach rank " + std::to_string(rank) + ": ";
    if (rank < 0 || rank >= num_ranks)
      return *why = failed + "there are " + std::to_string(num_ranks) + " ranks", nullptr;
    Process owner = 0;
    if (me == 0) return *why = failed + "/proc/self/stat cannot be read", nullptr;
    if (!segment->seat(rank).owner.compare_exchange_strong(owner, me) && owner != me) {
      return *why = failed + "process " + std::to_string(pid_of(owner)) + " has attached it",
             nullptr;
    }
  }
  return segment;
}

// Locks the first segment. `ok` is true if it holds the lock.
class Segment::Renewal {
 public:
  explicit Renewal(Header& header) : header_(header) {
    timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += 10;  // the lock is held only for a few system calls
    const int error = pthread_mutex_timedlock(&header_.renewal, &end);
    if (error == EOWNERDEAD) pthread_mutex_consistent(&header_.renewal);
    ok = error == 0 || error == EOWNERDEAD;
  }
  Renewal(const Renewal&) = delete;
  ~Renewal() {
    if (ok) pthread_mutex_unlock(&header_.renewal);
  }

  bool ok;

 private:
  Header& header_;
};

std::shared_ptr<Segment> Segment::renew(Segment& first, Segment& current, std::string* why) {
  current.stop({Code::kAborted,
                "jdp: another process left this communicator with reset(). After a failure, all "
                "its processes must call reset()"});
  Header& header = first.header();
  const Renewal renewal(header);
  if (!renewal.ok) return *why = "another process hangs in reset()", nullptr;
  const auto successor = [&] {
    return attach(header.successor_pid, header.successor_fd, header.successor, first.num_ranks(),
                  current.local_ranks_, why);
  };
  if (header.successor != 0 && header.successor != current.header().nonce) {
    // Its creator may have ended, and it may be stopped already.
    const auto newest = successor();
    if (newest && !newest->is_stopped()) return newest;
  }
  const int fd = create(first.num_ranks(), &header.successor);
  if (fd < 0) return *why = last_error("cannot create shared memory"), nullptr;
  header.successor_pid = getpid();
  header.successor_fd = fd;
  return successor();
}

Segment::Segment(int fd, void* memory, size_t size, std::vector<int> local_ranks)
    : fd_(fd), memory_(memory), size_(size), local_ranks_(std::move(local_ranks)) {}

Segment::~Segment() {
  munmap(memory_, size_);
  close(fd_);
}

int Segment::num_ranks() const { return static_cast<int>(header().num_ranks); }

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
  Header& shared = header();
  uint32_t running = kRunning;
  if (shared.stopped.compare_exchange_strong(running, kWritingReason)) {
    shared.code = why.code;
    std::snprintf(shared.message, sizeof shared.message, "%s", why.message.c_str());
    shared.stopped.store(kReasonWritten);
    for (int rank = 0; rank < num_ranks(); ++rank) {
      Seat& peer = seat(rank);
      for (Counter* counter :
           {&peer.sent, &peer.reduced, &peer.mailbox.sent, &peer.mailbox.received}) {
        wake(*counter);
      }
    }
  }
  return stop_reason();
}

bool Segment::is_stopped() const {
  return header().stopped.load(std::memory_order_relaxed) != kRunning;
}

Status Segment::stop_reason() const {
  const Header& shared = header();
  // The process that was writing the reason may have been killed.
  for (int i = 0; i < 100 && shared.stopped.load() == kWritingReason; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (shared.stopped.load() == kReasonWritten) return {shared.code, shared.message};
  return {Code::kAborted, "jdp: another process ended this communicator"};
}

}  // namespace jdp
