// Vector clocks: finds two kernels that touch the same memory although nothing orders their streams.
//
// Every stream counts its kernels. A clock says, for each stream, how many of its kernels have certainly ended before a
// point in a program. Streams learn from each other through events, and the host learns by synchronizing.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "device.h"

namespace sim {

// torch takes the streams of a CUDA device in turn from a pool of 32.
constexpr int kPoolStreams = 32;
constexpr int kStreams = kDevices * (1 + kPoolStreams);

struct Clock {
  std::array<uint64_t, kStreams> kernels{};

  void join(const Clock& other);
};

// Bytes of a block: the streams of two kernels need no order if they touch different ones.
struct Bytes {
  int64_t begin;
  int64_t end;

  bool overlap(const Bytes& other) const {
    return begin < other.end && other.begin < end;
  }
  bool contain(const Bytes& other) const {
    return begin <= other.begin && other.end <= end;
  }
};

struct Access {
  int stream;
  uint64_t kernel;
  std::string where;
  Bytes bytes;
};

// The accesses to one block of memory that no later write has replaced.
struct History {
  std::vector<Access> writes;
  std::vector<Access> reads;
};

// One kernel: its place in the order of all kernels.
class Kernel {
 public:
  Kernel(int stream, std::string name);

  void read(History& history, Bytes bytes) const;
  void write(History& history, Bytes bytes) const;

 private:
  int stream_;
  uint64_t number_;
  std::string where_;
};

namespace clocks {

Clock of_stream(int stream);
void wait(int stream, const Clock& clock);
void host_waits(const Clock& clock);

// A tensor is dropped. The allocator gives its memory to the next tensor of the stream `owner`, after what the streams
// in `recorded` have been given so far.
void check_free(const History& history, int owner, const std::vector<int>& recorded);

// Whether the host has waited for every kernel that was launched.
bool host_knows_all();

std::vector<std::string> races();
std::vector<std::string> host_syncs();
void count_host_sync(const std::string& what);
void reset();

}  // namespace clocks

// The Python frames of the calling thread, innermost first; empty in a thread without any.
std::string python_stack();

}  // namespace sim
