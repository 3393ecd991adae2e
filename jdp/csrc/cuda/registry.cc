#include "registry.h"

#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace jdp {
namespace {

using Key = std::pair<int64_t, int32_t>;

struct Registry {
  std::mutex mutex;
  std::map<Key, std::shared_ptr<Communicator>> entries;
};

// Never destroyed: at the end of a process CUDA may be gone before its memory is given back.
Registry& registry() {
  static Registry* const registry = new Registry;
  return *registry;
}

}  // namespace

void enter(int64_t key, int32_t ordinal, std::shared_ptr<Communicator> communicator) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().entries[{key, ordinal}].swap(communicator);
}

std::shared_ptr<Communicator> find(int64_t key, int32_t ordinal) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  const auto found = registry().entries.find({key, ordinal});
  return found == registry().entries.end() ? nullptr : found->second;
}

void remove(int64_t key, int32_t ordinal) {
  std::shared_ptr<Communicator> last;  // its end waits for the device: not under the lock
  std::lock_guard<std::mutex> lock(registry().mutex);
  const auto found = registry().entries.find({key, ordinal});
  if (found == registry().entries.end()) return;
  last = std::move(found->second);
  registry().entries.erase(found);
}

void for_each(const std::function<void(Communicator&)>& visit) {
  std::vector<std::shared_ptr<Communicator>> all;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    for (const auto& [key, communicator] : registry().entries) all.push_back(communicator);
  }
  for (const auto& communicator : all) visit(*communicator);
}

}  // namespace jdp
