#include "queues.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <random>
#include <thread>

#include "clocks.h"

namespace sim::queues {
namespace {

std::atomic<bool> enabled{false};
std::atomic<unsigned> delay_seed{0};
std::atomic<unsigned> longest_delay{0};
std::mutex error_mutex;
std::string first_error;

class Queue {
 public:
  explicit Queue(int stream) : delays_(delay_seed + stream), thread_([this] { run(); }) {
    thread_.detach();
  }

  void push(Task task) {
    {
      std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    pushed_.notify_one();
  }

 private:
  [[noreturn]] void run() {
    while (true) {
      Task task;
      {
        std::unique_lock lock(mutex_);
        pushed_.wait(lock, [this] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      // Streams that nothing orders drift apart.
      std::this_thread::sleep_for(std::chrono::microseconds(delays_() % longest_delay));
      try {
        task();
      } catch (const std::exception& error) {
        std::lock_guard lock(error_mutex);
        if (first_error.empty()) {
          first_error = error.what();
        }
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable pushed_;
  std::deque<Task> tasks_;
  std::minstd_rand delays_;
  std::thread thread_;
};

// Never freed: their threads may still run when the process ends.
std::array<std::atomic<Queue*>, kStreams> queues{};

Queue& queue_of(int stream) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (queues[stream] == nullptr) {
    queues[stream] = new Queue(stream);
  }
  return *queues[stream];
}

}  // namespace

bool asynchronous() {
  return enabled;
}

void set_asynchronous(bool on, unsigned seed, unsigned microseconds) {
  delay_seed = seed;
  longest_delay = std::max(1U, microseconds);
  enabled = on;
}

void push(int stream, Task task) {
  queue_of(stream).push(std::move(task));
}

Done mark(int stream) {
  auto promise = std::make_shared<std::promise<void>>();
  if (asynchronous() && queues[stream] != nullptr) {
    push(stream, [promise] { promise->set_value(); });
  } else {
    promise->set_value();
  }
  return promise->get_future().share();
}

void wait_in_stream(int stream, Done done) {
  if (asynchronous()) {
    push(stream, [done = std::move(done)] { done.wait(); });
  }
}

void wait_in_host(const Done& done) {
  done.wait();
  std::string error;
  {
    std::lock_guard lock(error_mutex);
    std::swap(error, first_error);
  }
  TORCH_CHECK(error.empty(), "CUDA error: device-side assert triggered\n", error);
}

}  // namespace sim::queues
