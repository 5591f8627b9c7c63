// A GPU as exchanges see it: copies between its memory and the host's, and how far its work has come.
//
// Work that is put into a stream happens in its order, later. No call here waits for it, but those that allocate and
// free memory, which may.

#ifndef POSEIDON_COMMUNICATOR_DEVICE_H_
#define POSEIDON_COMMUNICATOR_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sum.h"

namespace poseidon {

class Device {
 public:
  using Stream = void*;                 // of the framework's handles, or one of the two below
  using Event = std::shared_ptr<void>;  // a place in a stream

  virtual ~Device() = default;

  // The streams of copies to the host, of copies to the GPU, and of what happens between GPUs.
  virtual Stream down() const = 0;
  virtual Stream up() const = 0;
  virtual Stream across() const = 0;

  // The place in a stream behind all that has been put into it. Any thread may call this, Wait, Copy and SumRows.
  virtual Event Record(Stream stream) = 0;

  // Lets what is put into `stream` from now on wait until `event` is done.
  virtual void Wait(Stream stream, const Event& event) = 0;

  // Whether the work before an event is done.
  virtual bool IsDone(const Event& event) = 0;

  // Copies `bytes` bytes within the GPU's memory, or between it and memory of Open or AllocateHost; with other memory
  // of the host the call may wait.
  virtual void Copy(Stream stream, void* to, const void* from, size_t bytes) = 0;

  // The same of `bytes` bytes of each of so many lines, one every `to_pitch` and `from_pitch` bytes.
  virtual void CopyLines(Stream stream, char* to, size_t to_pitch, const char* from, size_t from_pitch, size_t bytes,
                         int64_t lines) {
    for (int64_t line = 0; line < lines; ++line) Copy(stream, to + line * to_pitch, from + line * from_pitch, bytes);
  }

  // SumInOrder of 1 to kMostSummands inputs in the GPU's memory.
  static constexpr size_t kMostSummands = 64;
  virtual void Sum(Stream stream, DataType dtype, const std::vector<Summand>& inputs, size_t bytes, void* output) = 0;

  // SumRows of values by lists, both in the GPU's memory.
  virtual void SumRows(Stream stream, DataType dtype, const void* values, int64_t columns, const RowLists& lists,
                       void* output) = 0;

  // poseidon::Convert of elements in the GPU's memory.
  virtual void Convert(Stream stream, DataType dtype, const void* from, int64_t count, DataType out_dtype,
                       void* out) = 0;

  // Keeps `owner` until what has been put into `stream` is done, and Release is called. Any thread may call these.
  virtual void KeepUntilDone(Stream stream, std::shared_ptr<void> owner) = 0;
  virtual void Release() = 0;

  // Memory of the host that the GPU reads and writes at the rate of its link; null, which is no failure, if there is no
  // more. Any thread may free it.
  virtual void* AllocateHost(size_t bytes) = 0;
  virtual void FreeHost(void* data) = 0;

  // Memory of the GPU; null, which is no failure, if there is no more.
  virtual void* Allocate(size_t bytes) = 0;
  virtual void Free(void* data) = 0;

  // What another process of this machine opens memory of Allocate by, of at most kHandleBytes; empty, which is no
  // failure, if none can. Open returns where it is for Copy, null if it cannot be reached from here. Others may read
  // exported memory after Free: the GPU has it until the process ends, and gives it to whoever allocates as much.
  static constexpr size_t kHandleBytes = 128;
  virtual std::string Export(void* data) = 0;
  virtual void* Open(const std::string& handle) = 0;
  virtual void Close(void* data) = 0;

  // Why a call above, or work that it has started, has failed; empty if none has. Nothing need be done after that.
  virtual std::string failure() const = 0;
};

}  // namespace poseidon

#endif  // POSEIDON_COMMUNICATOR_DEVICE_H_
