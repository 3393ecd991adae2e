#include "rendezvous_registry.h"

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>

#include "rendezvous.h"

namespace jdp {
namespace {

// The rendezvous that some ranks have not joined yet.
class Registry {
 public:
  std::shared_ptr<Rendezvous> join(const Call& call, const Bucket& bucket) {
    const std::lock_guard<std::mutex> lock(rendezvous_mutex());
    const Key key{call.run, call.group, call.bucket};
    std::shared_ptr<Rendezvous>& place = rendezvous_[key];
    if (!place) {
      const uint64_t nth = ++num_calls_[{call.group, call.bucket}];
      place = std::make_shared<Rendezvous>(call, bucket, nth);
    }
    const std::shared_ptr<Rendezvous> rendezvous = place;
    if (rendezvous->join(call, bucket)) rendezvous_.erase(key);
    return rendezvous;
  }

  void forget() {
    const std::lock_guard<std::mutex> lock(rendezvous_mutex());
    rendezvous_.clear();
    num_calls_.clear();
  }

 private:
  using Key = std::tuple<int64_t, int32_t, int32_t>;
  // A failed one stays until all its ranks have joined, so that late ones fail too.
  std::map<Key, std::shared_ptr<Rendezvous>> rendezvous_;
  std::map<std::pair<int32_t, int32_t>, uint64_t> num_calls_;  // by group and bucket
};

Registry& registry() {
  static Registry* only = new Registry;
  return *only;
}

}  // namespace

Status collective_in_process(const Call& call, const Bucket& bucket) {
  return registry().join(call, bucket)->take_part(call, bucket);
}

void forget_rendezvous() { registry().forget(); }

}  // namespace jdp
