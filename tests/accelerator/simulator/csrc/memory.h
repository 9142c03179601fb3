// Device memory: host memory with a count and a limit per device, and pinned host memory.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <memory>
#include <vector>

#include "clocks.h"

namespace sim {

// The memory of one storage. Kernels that have not run yet keep it, so that late ones read poison and not freed memory.
struct Block {
  c10::DataPtr memory;
  size_t nbytes = 0;
  int device = 0;
  int owner = 0;  // the stream that allocated it, and may reuse it first
  std::vector<int> recorded;
  History history;
};

namespace memory {

// Fresh memory of the current stream of `device`; raises OutOfMemoryError above the limit.
c10::DataPtr allocate(int device, size_t nbytes);
// Takes the memory of a CPU storage for the device.
c10::DataPtr adopt(int device, c10::Storage storage);

std::shared_ptr<Block> block_of(const c10::DataPtr& data);
std::shared_ptr<Block> block_of(const at::TensorBase& tensor);
// From the first to the last byte of a tensor in its block.
Bytes bytes_of(const at::TensorBase& tensor);

void set_limit(size_t nbytes);
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);
void register_allocators();

}  // namespace memory
}  // namespace sim
