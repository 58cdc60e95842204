// What torch asks of a CUDA device beside its operations: here that there is one, with one stream.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceType;
using c10::Stream;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  const Device device{DeviceType::CUDA, 0};

  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return device; }
  Device getDevice() const override { return device; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};

c10::impl::DeviceGuardImplRegistrar registered(DeviceType::CUDA, new Guard());

struct Hooks final : at::CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};

}  // namespace

// Exchange the hooks that torch made when it was imported for these, or back. It keeps the object, which has
// no members, so its table of functions is exchanged.
extern "C" void exchange_hooks() {
  static Hooks ours;
  const at::CUDAHooksInterface& torchs = at::detail::getCUDAHooks();
  static_assert(sizeof(Hooks) == sizeof(void*));
  void** a = reinterpret_cast<void**>(&ours);
  void** b = reinterpret_cast<void**>(const_cast<at::CUDAHooksInterface*>(&torchs));
  std::swap(*a, *b);
}
