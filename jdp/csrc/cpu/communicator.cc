#include "communicator.h"

#include <map>
#include <mutex>
#include <utility>

#include "segment_call.h"

namespace jdp {
namespace {

struct LocalRank {
  std::mutex busy;                        // one call at a time
  std::map<int32_t, uint64_t> num_calls;  // by bucket
};

struct Communicator {
  std::shared_ptr<Segment> first;  // holds the address of the latest segment
  std::shared_ptr<Segment> segment;
  std::map<int, LocalRank> ranks;
};

std::shared_ptr<Communicator> communicator_in(std::shared_ptr<Segment> first,
                                              std::shared_ptr<Segment> segment) {
  auto made = std::make_shared<Communicator>();
  for (int rank = 0; rank < segment->num_ranks(); ++rank) {
    if (segment->is_local(rank)) made->ranks[rank];
  }
  made->first = std::move(first);
  made->segment = std::move(segment);
  return made;
}

// Guards the table only, not the communicators in it.
std::mutex& table_mutex() {
  static std::mutex* mutex = new std::mutex;
  return *mutex;
}

std::map<std::pair<int64_t, int32_t>, std::shared_ptr<Communicator>>& table() {
  static auto* only = new std::map<std::pair<int64_t, int32_t>, std::shared_ptr<Communicator>>;
  return *only;
}

}  // namespace

Status collective_in_segment(const Call& call, const Bucket& bucket) {
  std::shared_ptr<Communicator> communicator;
  {
    const std::lock_guard<std::mutex> lock(table_mutex());
    const auto found = table().find({call.communicator, call.group});
    if (found != table().end()) communicator = found->second;
  }
  if (!communicator || !communicator->ranks.count(call.rank) ||
      communicator->segment->num_ranks() != call.num_ranks) {
    return invalid(call, 0,
                   "this process has not attached rank " + std::to_string(call.rank) + " of " +
                       std::to_string(call.num_ranks) + " to communicator " +
                       std::to_string(call.communicator) + ", group " + std::to_string(call.group));
  }
  Segment& segment = *communicator->segment;
  LocalRank& local = communicator->ranks[call.rank];
  const std::lock_guard<std::mutex> lock(local.busy);
  if (segment.is_stopped()) return segment.stop_reason();
  return SegmentCall(call, bucket, ++local.num_calls[call.bucket], segment).run();
}

void attach_communicator(int64_t communicator, int32_t group, std::shared_ptr<Segment> segment) {
  auto made = communicator_in(segment, segment);
  const std::lock_guard<std::mutex> lock(table_mutex());
  table()[{communicator, group}] = std::move(made);
}

bool renew_communicators(std::string* why) {
  const std::lock_guard<std::mutex> lock(table_mutex());
  bool is_done = true;
  for (auto entry = table().begin(); entry != table().end();) {
    const Communicator& before = *entry->second;
    auto segment = Segment::renew(*before.first, *before.segment, why);
    is_done = is_done && segment;
    if (segment) {
      entry->second = communicator_in(before.first, std::move(segment));
      ++entry;
    } else {
      entry = table().erase(entry);
    }
  }
  return is_done;
}

void stop_communicators(const std::string& reason) {
  const std::lock_guard<std::mutex> lock(table_mutex());
  for (const auto& entry : table()) entry.second->segment->stop({Code::kAborted, "jdp: " + reason});
}

void detach_communicators() {
  const std::lock_guard<std::mutex> lock(table_mutex());
  table().clear();
}

}  // namespace jdp
