#include "clocks.h"

#include <Python.h>

#include <algorithm>
#include <mutex>
#include <sstream>

namespace sim {
namespace {

std::mutex mutex;
std::array<Clock, kStreams> stream_clocks;
// One clock for all threads: threads order each other's work by means that are invisible here.
Clock host;
std::vector<std::string> found_races;
std::vector<std::string> found_host_syncs;

constexpr int kFrames = 12;
constexpr size_t kMaxRaces = 200;

std::string stream_name(int stream) {
  std::ostringstream name;
  if (stream < kDevices) {
    name << "the default stream of device " << stream;
  } else {
    name << "stream " << stream << " of device " << (stream - kDevices) / kPoolStreams;
  }
  return name.str();
}

bool before(const Access& access, const Clock& clock) {
  return access.kernel <= clock.kernels[access.stream];
}

void report(const std::string& kind, const Access& earlier, const std::string& now, int stream) {
  if (found_races.size() < kMaxRaces) {
    found_races.push_back(
        kind + ": on " + stream_name(stream) + "\n" + now + "\nnothing orders it after the access on " +
        stream_name(earlier.stream) + "\n" + earlier.where);
  }
}

void report_unordered(
    const std::string& kind, const std::vector<Access>& earlier, Bytes bytes, const std::string& now, int stream) {
  for (const auto& access : earlier) {
    if (access.bytes.overlap(bytes) && !before(access, stream_clocks[stream])) {
      report(kind, access, now, stream);
    }
  }
}

}  // namespace

void Clock::join(const Clock& other) {
  for (int stream = 0; stream < kStreams; ++stream) {
    kernels[stream] = std::max(kernels[stream], other.kernels[stream]);
  }
}

Kernel::Kernel(int stream, std::string name) : stream_(stream), where_(std::move(name)) {
  // Before the lock: reading Python frames takes the GIL.
  where_ += python_stack();
  std::lock_guard lock(mutex);
  // The host launches this kernel after everything it has waited for.
  stream_clocks[stream].join(host);
  number_ = ++stream_clocks[stream].kernels[stream];
}

void Kernel::read(History& history, Bytes bytes) const {
  std::lock_guard lock(mutex);
  report_unordered("read after write", history.writes, bytes, where_, stream_);
  std::erase_if(history.reads, [&](const Access& read) { return read.stream == stream_ && bytes.contain(read.bytes); });
  history.reads.push_back({stream_, number_, where_, bytes});
}

void Kernel::write(History& history, Bytes bytes) const {
  std::lock_guard lock(mutex);
  report_unordered("write after write", history.writes, bytes, where_, stream_);
  report_unordered("write after read", history.reads, bytes, where_, stream_);
  auto replaced = [&](const Access& access) { return bytes.contain(access.bytes); };
  std::erase_if(history.writes, replaced);
  std::erase_if(history.reads, replaced);
  history.writes.push_back({stream_, number_, where_, bytes});
}

namespace clocks {

Clock of_stream(int stream) {
  std::lock_guard lock(mutex);
  stream_clocks[stream].join(host);
  return stream_clocks[stream];
}

void wait(int stream, const Clock& clock) {
  std::lock_guard lock(mutex);
  stream_clocks[stream].join(clock);
}

void host_waits(const Clock& clock) {
  std::lock_guard lock(mutex);
  host.join(clock);
}

void check_free(const History& history, int owner, const std::vector<int>& recorded) {
  std::lock_guard lock(mutex);
  auto reuse = stream_clocks[owner];
  reuse.join(host);
  for (int stream : recorded) {
    reuse.join(stream_clocks[stream]);
  }
  for (const auto* accesses : {&history.writes, &history.reads}) {
    for (const auto& access : *accesses) {
      if (!before(access, reuse)) {
        report("memory reused without record_stream", access, "(the tensor was dropped)", owner);
      }
    }
  }
}

bool host_knows_all() {
  std::lock_guard lock(mutex);
  for (int stream = 0; stream < kStreams; ++stream) {
    if (stream_clocks[stream].kernels[stream] > host.kernels[stream]) {
      return false;
    }
  }
  return true;
}

std::vector<std::string> races() {
  std::lock_guard lock(mutex);
  return found_races;
}

std::vector<std::string> host_syncs() {
  std::lock_guard lock(mutex);
  return found_host_syncs;
}

void count_host_sync(const std::string& what) {
  auto where = what + python_stack();
  std::lock_guard lock(mutex);
  found_host_syncs.push_back(std::move(where));
}

void reset() {
  std::lock_guard lock(mutex);
  found_races.clear();
  found_host_syncs.clear();
}

}  // namespace clocks

std::string python_stack() {
  if (!Py_IsInitialized()) {
    return "";
  }
  std::ostringstream lines;
  auto gil = PyGILState_Ensure();
  auto* frame = PyThreadState_GetFrame(PyThreadState_Get());
  for (int depth = 0; frame != nullptr && depth < kFrames; ++depth) {
    auto* code = PyFrame_GetCode(frame);
    lines << "\n    " << PyUnicode_AsUTF8(code->co_filename) << ":" << PyFrame_GetLineNumber(frame) << " "
          << PyUnicode_AsUTF8(code->co_name);
    Py_DECREF(code);
    auto* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  PyGILState_Release(gil);
  return lines.str();
}

}  // namespace sim
