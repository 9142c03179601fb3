// Asynchronous mode: every stream runs its kernels in a thread of its own, later than the host launched them.
#pragma once

#include <functional>
#include <future>
#include <memory>

namespace sim::queues {

using Task = std::function<void()>;
using Done = std::shared_future<void>;

// False: a kernel has run when its launch returns, and the functions below do nothing.
bool asynchronous();
// A kernel starts up to `microseconds` late, by random numbers that `seed` gives.
void set_asynchronous(bool on, unsigned seed, unsigned microseconds);

void push(int stream, Task task);
// Ends when the stream has run everything pushed so far.
Done mark(int stream);
void wait_in_stream(int stream, Done done);
// Raises the first error of a kernel, as CUDA does at the next synchronization.
void wait_in_host(const Done& done);

}  // namespace sim::queues
