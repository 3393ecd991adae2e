// A driver that holds the context that is current, for device_test.cc.

void* current_context = nullptr;

extern "C" int cuCtxGetCurrent(void** context) {
  *context = current_context;
  return 0;
}
