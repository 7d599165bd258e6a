// What a build of torch for the CPU lacks to trace for CUDA: somebody who says which device is current, and that
// CUDA is known. No memory, no kernels, no streams that run: fake tensors need none of them.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr c10::DeviceType kType = c10::DeviceType::CUDA;
constexpr c10::DeviceIndex kNumDevices = 8;
thread_local c10::DeviceIndex current = 0;

c10::Stream default_stream(c10::DeviceIndex index) {
  return c10::Stream(c10::Stream::DEFAULT, c10::Device(kType, index));
}

// Sets and tells the current device; a stream is always the default one, and an event has always happened.
class StandInGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  c10::Device getDevice() const override { return {kType, current}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) {
      current = device.index();
    }
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  c10::Stream getStream(c10::Device device) const override { return default_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override { return default_stream(device.index()); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return default_stream(stream.device_index()); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

StandInGuard guard;
c10::impl::DeviceGuardImplRegistrar registrar(kType, &guard);

}  // namespace

namespace at {

// torch looks for a class of this name. CUDA is there, and whatever would run a kernel has none to run.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex getCurrentDevice() const override { return current; }
};

// A build for CUDA has hooks of its own, which ask a driver that is not there: these go before them.
using Hooks = c10::Registerer<std::string, std::unique_ptr<CUDAHooksInterface>, CUDAHooksArgs>;
Hooks hooks("CUDAHooks", c10::REGISTRY_PREFERRED, CUDAHooksRegistry(), Hooks::DefaultCreator<CUDAHooks>);

}  // namespace at
