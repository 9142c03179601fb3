// The name under which torch knows the simulated devices, how many there are, and which one is current.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>

namespace sim {

#ifdef SIM_CUDA
constexpr auto kDeviceType = c10::DeviceType::CUDA;
constexpr auto kDispatchKey = c10::DispatchKey::CUDA;
#define SIM_KEY CUDA
#else
constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;
constexpr auto kDispatchKey = c10::DispatchKey::PrivateUse1;
#define SIM_KEY PrivateUse1
#endif

constexpr int kDevices = 4;

// Every thread has a current device of its own, as with CUDA.
inline thread_local int current_device = 0;

inline c10::Device device_at(int index) {
  return {kDeviceType, static_cast<c10::DeviceIndex>(index)};
}

}  // namespace sim
