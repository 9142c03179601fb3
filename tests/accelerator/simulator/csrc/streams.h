// Streams and events, through the interface by which torch sets devices and streams.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <string>

namespace sim::streams {

// The index of the calling thread's current stream of `device`, over all devices.
int current(int device);
int index_of(const c10::Stream& stream);
int device_of(int stream);

// Everything launched on `stream` later runs after everything launched on `other` so far.
void wait_stream(int stream, int other);
// The host waits until `stream` has run everything; `what` names the reason in the count.
void synchronize(int stream, const std::string& what);

void record_data(const c10::DataPtr& data, const c10::Stream& stream);
void register_guard();

}  // namespace sim::streams
