#include "stand_in/runtime.h"

#include <cstdlib>
#include <cstring>

Runtime runtime;

bool Runtime::fails(const char* name) {
  if (++num_calls != failing) return false;
  failed = name;
  return true;
}

void Runtime::enqueue(Stream* stream, const char* name, std::vector<Access> accesses) {
  if (work.size() == kMaxWork) abort();
  stream->before |= waited;
  stream->before.set(work.size());
  WorkSet before = stream->before;
  before.reset(work.size());
  work.push_back({name, std::move(accesses), before});
}

std::string Runtime::race() const {
  for (size_t later = 0; later < work.size(); ++later) {
    for (size_t first = 0; first < later; ++first) {
      if (work[later].before[first]) continue;
      for (const Access& a : work[first].accesses) {
        for (const Access& b : work[later].accesses) {
          if ((a.writes || b.writes) && a.begin < b.end && b.begin < a.end) {
            return std::string(work[first].name) + " " + std::to_string(first) + " and " +
                   work[later].name + " " + std::to_string(later);
          }
        }
      }
    }
  }
  return "";
}

namespace {

constexpr cudaError_t kRefused = 101;

cudaError_t result(const char* name) { return runtime.fails(name) ? kRefused : cudaSuccess; }

template <typename T>
cudaError_t made(T** object, const char* name) {
  if (runtime.fails(name)) return kRefused;
  *object = new T;
  runtime.live.insert(*object);
  return cudaSuccess;
}

cudaError_t allocated(void** memory, size_t bytes, const char* name) {
  if (runtime.fails(name)) return kRefused;
  *memory = malloc(bytes);
  runtime.live.insert(*memory);
  return cudaSuccess;
}

cudaError_t freed(void* memory, const char* name) {
  if (memory && !runtime.live.erase(memory)) abort();
  free(memory);
  return result(name);
}

template <typename T>
cudaError_t destroyed(T* object, const char* name) {
  if (!runtime.live.erase(object)) abort();
  delete object;
  return result(name);
}

Access access(const void* memory, int64_t bytes, bool writes) {
  const char* begin = static_cast<const char*>(memory);
  return {begin, begin + bytes, writes};
}

void enqueue_segments(const jdp::Arguments& arguments, int64_t bytes_each, const char* name,
                      std::vector<Access> accesses, cudaStream_t stream) {
  for (int i = 0; i < arguments.num_segments; ++i) {
    const jdp::Segment& segment = arguments.segments[i];
    accesses.push_back(access(segment.in, segment.size * bytes_each, false));
    accesses.push_back(access(segment.out, segment.size * bytes_each, true));
  }
  runtime.enqueue(stream, name, std::move(accesses));
}

}  // namespace

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return result("cudaGetDevice");
}
cudaError_t cudaSetDevice(int) { return result("cudaSetDevice"); }
cudaError_t cudaGetDeviceCount(int* num_devices) {
  *num_devices = 1;
  return result("cudaGetDeviceCount");
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "refused"; }

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  return allocated(memory, bytes, "cudaMalloc");
}
cudaError_t cudaFree(void* memory) { return freed(memory, "cudaFree"); }
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  return allocated(memory, bytes, "cudaHostAlloc");
}
cudaError_t cudaFreeHost(void* memory) { return freed(memory, "cudaFreeHost"); }
cudaError_t cudaMemsetAsync(void* memory, int, size_t bytes, cudaStream_t stream) {
  if (runtime.fails("cudaMemsetAsync")) return kRefused;
  runtime.enqueue(stream, "a memset", {access(memory, bytes, true)});
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  if (runtime.fails("cudaMemcpyAsync")) return kRefused;
  if (kind == cudaMemcpyDefault) memset(to, 0, bytes);  // the host reads it
  runtime.enqueue(stream, "a copy of the scale",
                  {access(from, bytes, false), access(to, bytes, true)});
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* low, int* high) {
  *low = *high = 0;
  return result("cudaDeviceGetStreamPriorityRange");
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return made(stream, "cudaStreamCreateWithPriority");
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return destroyed(stream, "cudaStreamDestroy");
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (runtime.fails("cudaStreamSynchronize")) return kRefused;
  runtime.waited |= stream->before;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (runtime.fails("cudaStreamWaitEvent")) return kRefused;
  stream->before |= event->before;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return made(event, "cudaEventCreateWithFlags");
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return destroyed(event, "cudaEventDestroy"); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (runtime.fails("cudaEventRecord")) return kRefused;
  event->before = stream->before;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr, int, int) {
  *value = 1;
  return result("cudaDeviceGetP2PAttribute");
}
cudaError_t cudaDeviceCanAccessPeer(int* can_access, int, int) {
  *can_access = 1;
  return result("cudaDeviceCanAccessPeer");
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  return result("cudaDeviceEnablePeerAccess");
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) {
  return result("cudaIpcGetMemHandle");
}
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t, unsigned) {
  return allocated(memory, 1, "cudaIpcOpenMemHandle");
}
cudaError_t cudaIpcCloseMemHandle(void* memory) { return freed(memory, "cudaIpcCloseMemHandle"); }

namespace jdp {

cudaError_t load_kernels() { return result("load_kernels"); }
cudaError_t count_resident_blocks(int* num_blocks) {
  *num_blocks = 132;
  return result("count_resident_blocks");
}
cudaError_t launch(Type type, const Arguments& arguments, cudaStream_t stream) {
  if (runtime.fails("launch")) return kRefused;
  enqueue_segments(arguments, bytes_of(type), "a reduction",
                   {access(arguments.scale, sizeof(float), false)}, stream);
  return cudaSuccess;
}
cudaError_t launch_copy(const Arguments& arguments, cudaStream_t stream) {
  if (runtime.fails("launch_copy")) return kRefused;
  enqueue_segments(arguments, 1, "a copy", {}, stream);
  return cudaSuccess;
}
cudaError_t launch_probe_write(const Arguments&, uint32_t*, cudaStream_t) {
  return result("launch_probe_write");
}
cudaError_t launch_probe_read(const Arguments&, uint32_t*, cudaStream_t) {
  return result("launch_probe_read");
}

}  // namespace jdp
