// The streams, events and copies of one GPU. The tests run what calls them, on a GPU of their own: these lines need a
// real one.
//
// Tests: tests/native/staging_test.cc.

#include "copies.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "../communicator/arithmetic.h"
#include "conversion.h"
#include "row_sum.h"

namespace poseidon {
namespace {

// ---- sums -----------------------------------------------------------------------------------

struct Summands {
  const void* data[Device::kMostSummands];
  DataType dtypes[Device::kMostSummands];
  int count;
};

// As SumBlocks in sum.cc computes an element.
template <typename T>
__device__ typename Arithmetic<T>::Accumulator Load(const Summands& inputs, int k, size_t i) {
  return Arithmetic<T>::Load(static_cast<const T*>(inputs.data[k])[i]);
}

template <>
__device__ float Load<float>(const Summands& inputs, int k, size_t i) {
  switch (inputs.dtypes[k]) {
    case DataType::kFloat16:
      return Float16::ToFloat(static_cast<const Float16*>(inputs.data[k])[i]);
    case DataType::kBfloat16:
      return Bfloat16::ToFloat(static_cast<const Bfloat16*>(inputs.data[k])[i]);
    default:
      return static_cast<const float*>(inputs.data[k])[i];
  }
}

template <typename T>
__global__ void SumKernel(Summands inputs, size_t count, T* output) {
  const size_t stride = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    typename Arithmetic<T>::Accumulator sum = Load<T>(inputs, 0, i);
    for (int k = 1; k < inputs.count; ++k) sum += Load<T>(inputs, k, i);
    output[i] = Arithmetic<T>::Store(sum);
  }
}

template <typename T>
void StartSum(cudaStream_t stream, const Summands& inputs, size_t bytes, void* output) {
  constexpr int kThreads = 256;
  constexpr size_t kMostBlocks = 1024;  // some on each multiprocessor: the memory of a GPU is kept busy
  const size_t count = bytes / sizeof(T);
  const auto blocks = static_cast<unsigned>(std::min((count + kThreads - 1) / kThreads, kMostBlocks));
  SumKernel<T><<<blocks, kThreads, 0, stream>>>(inputs, count, static_cast<T*>(output));
}

// ---- memory of other processes --------------------------------------------------------------

// By which a process opens memory of another one; in its own it is where it is.
struct Handle {
  std::array<uint64_t, 2> process;  // random: processes of other containers may have the same number
  void* data;
  cudaIpcMemHandle_t ipc;
};
static_assert(sizeof(Handle) <= Device::kHandleBytes, "a handle has room in a message");

std::array<uint64_t, 2> ThisProcess() {
  static const auto process = [] {
    std::random_device random;
    auto number = [&random] { return uint64_t{random()} << 32 | random(); };
    return std::array<uint64_t, 2>{number(), number()};
  }();
  return process;
}

class Gpu : public Device {
 public:
  explicit Gpu(int number) : number_(number) {
    const Current current(this);
    int lowest = 0, highest = 0;
    Check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "no priorities of streams");
    for (cudaStream_t* stream : {&down_, &up_, &across_}) {
      Check(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, highest), "no stream for copies");
    }
  }

  Stream down() const override { return down_; }
  Stream up() const override { return up_; }
  Stream across() const override { return across_; }

  Event Record(Stream stream) override {
    const Current current(this);
    const cudaEvent_t event = TakeEvent();
    Check(cudaEventRecord(event, static_cast<cudaStream_t>(stream)), "no event of a stream");
    return Event(event, [this](void* event) {
      std::lock_guard<std::mutex> lock(mutex_);
      events_.push_back(static_cast<cudaEvent_t>(event));
    });
  }

  void Wait(Stream stream, const Event& event) override {
    const Current current(this);
    Check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event.get()), 0),
          "a stream cannot wait for an event");
  }

  bool IsDone(const Event& event) override {
    const Current current(this);
    const cudaError_t error = cudaEventQuery(static_cast<cudaEvent_t>(event.get()));
    if (error == cudaErrorNotReady) {
      cudaGetLastError();  // or it would be that of whoever looks next
      return false;
    }
    return Check(error, "work that the GPU was given");
  }

  void Copy(Stream stream, void* to, const void* from, size_t bytes) override {
    const Current current(this);
    Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)), "a copy");
  }

  void CopyLines(Stream stream, char* to, size_t to_pitch, const char* from, size_t from_pitch, size_t bytes,
                 int64_t lines) override {
    if (lines == 1) return Copy(stream, to, from, bytes);  // pitches have less than 2 GiB
    const Current current(this);
    Check(cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, bytes, lines, cudaMemcpyDefault,
                            static_cast<cudaStream_t>(stream)),
          "a copy of lines");
  }

  void Sum(Stream stream, DataType dtype, const std::vector<Summand>& inputs, size_t bytes, void* output) override {
    const Current current(this);
    if (bytes == 0) return;
    if (inputs.size() == 1 && inputs[0].dtype == dtype) {  // its own bits
      if (inputs[0].data != output) Copy(stream, output, inputs[0].data, bytes);
      return;
    }
    Summands summands;
    summands.count = static_cast<int>(inputs.size());
    for (size_t k = 0; k < inputs.size(); ++k) {
      summands.data[k] = inputs[k].data;
      summands.dtypes[k] = inputs[k].dtype;
    }
    using Start = void (*)(cudaStream_t, const Summands&, size_t, void*);
    constexpr Start kStarts[] = {StartSum<float>,    StartSum<double>,   StartSum<Float16>,
                                 StartSum<Bfloat16>, StartSum<uint32_t>, StartSum<uint64_t>};  // by DataType
    kStarts[static_cast<int>(dtype)](static_cast<cudaStream_t>(stream), summands, bytes, output);
    Check(cudaGetLastError(), "a sum");
  }

  void SumRows(Stream stream, DataType dtype, const void* values, int64_t columns, const RowLists& lists,
               void* output) override {
    const Current current(this);
    Check(static_cast<cudaError_t>(
              StartRowSums(static_cast<cudaStream_t>(stream), dtype, values, columns, lists, output)),
          "a sum of rows");
  }

  void Convert(Stream stream, DataType dtype, const void* from, int64_t count, DataType out_dtype, void* out) override {
    const Current current(this);
    Check(static_cast<cudaError_t>(
              StartConversion(static_cast<cudaStream_t>(stream), dtype, out_dtype, from, count, out)),
          "a conversion");
  }

  void KeepUntilDone(Stream stream, std::shared_ptr<void> owner) override {
    Event event = Record(stream);
    std::lock_guard<std::mutex> lock(kept_mutex_);
    kept_.emplace_back(std::move(event), std::move(owner));
  }

  void Release() override {
    std::vector<std::shared_ptr<void>> done;  // given back without the lock, which may be wanted for that
    std::lock_guard<std::mutex> lock(kept_mutex_);
    for (; !kept_.empty() && IsDone(kept_.front().first); kept_.pop_front()) {
      done.push_back(std::move(kept_.front().second));
    }
  }

  void* AllocateHost(size_t bytes) override {
    const Current current(this);
    void* data = nullptr;
    if (cudaHostAlloc(&data, bytes, cudaHostAllocDefault) == cudaSuccess) return data;
    cudaGetLastError();  // or it would be that of whoever looks next
    return nullptr;
  }

  void FreeHost(void* data) override {
    const Current current(this);
    cudaFreeHost(data);  // fails at the end of the process, which frees it
  }

  void* Allocate(size_t bytes) override {
    const Current current(this);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (const auto found = spare_.find(bytes); found != spare_.end()) return spare_.extract(found).mapped();
    }
    void* data = nullptr;
    if (cudaMalloc(&data, bytes) == cudaSuccess) {
      std::lock_guard<std::mutex> lock(mutex_);
      allocated_[data] = {bytes, false};
      return data;
    }
    cudaGetLastError();  // or it would be that of whoever looks next
    return nullptr;
  }

  void Free(void* data) override {
    const Current current(this);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto found = allocated_.find(data);
      if (found->second.is_exported) {  // CUDA forbids to free it while another process has it open
        spare_.emplace(found->second.bytes, data);
        return;
      }
      allocated_.erase(found);
    }
    cudaFree(data);  // fails at the end of the process, which frees it
  }

  std::string Export(void* data) override {
    const Current current(this);
    Handle handle = {};
    handle.process = ThisProcess();
    handle.data = data;
    if (cudaIpcGetMemHandle(&handle.ipc, data) != cudaSuccess) {
      cudaGetLastError();
      return "";
    }
    std::lock_guard<std::mutex> lock(mutex_);
    allocated_.at(data).is_exported = true;
    return {reinterpret_cast<const char*>(&handle), sizeof(handle)};
  }

  void* Open(const std::string& text) override {
    const Current current(this);
    Handle handle;
    if (text.size() != sizeof(handle)) return nullptr;
    std::memcpy(&handle, text.data(), sizeof(handle));
    if (handle.process == ThisProcess()) return handle.data;
    void* data = nullptr;
    if (cudaIpcOpenMemHandle(&data, handle.ipc, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess) {
      cudaGetLastError();
      return nullptr;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    opened_.push_back(data);
    return data;
  }

  void Close(void* data) override {
    const Current current(this);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto found = std::find(opened_.begin(), opened_.end(), data);
      if (found == opened_.end()) return;  // of this process
      opened_.erase(found);
    }
    cudaIpcCloseMemHandle(data);  // fails at the end of the process, which closes it
  }

  std::string failure() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
  }

 private:
  // Makes the GPU the current one of this thread, which belongs to others, while it lives.
  class Current {
   public:
    explicit Current(Gpu* gpu) {
      cudaGetDevice(&before_);
      if (before_ != gpu->number_) gpu->Check(cudaSetDevice(gpu->number_), "the GPU cannot be used");
      is_changed_ = before_ != gpu->number_;
    }
    ~Current() {
      if (is_changed_) cudaSetDevice(before_);
    }

   private:
    int before_ = 0;
    bool is_changed_ = false;
  };

  // Returns whether there is no error; notes the first one.
  bool Check(cudaError_t error, const std::string& what) {
    if (error == cudaSuccess) return true;
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.empty()) failure_ = what + ": " + cudaGetErrorString(error);
    return false;
  }

  cudaEvent_t TakeEvent() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!events_.empty()) {
        const cudaEvent_t event = events_.back();
        events_.pop_back();
        return event;
      }
    }
    cudaEvent_t event = nullptr;
    Check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "no event");
    return event;
  }

  const int number_;
  cudaStream_t down_ = nullptr, up_ = nullptr, across_ = nullptr;
  struct Allocated {
    size_t bytes;
    bool is_exported;
  };
  mutable std::mutex mutex_;  // guards what follows, but for what is kept
  std::string failure_;
  std::map<void*, Allocated> allocated_;
  std::multimap<size_t, void*> spare_;  // by bytes: exported memory that nobody uses
  std::vector<void*> opened_;           // of other processes
  std::vector<cudaEvent_t> events_;     // that nobody uses
  std::mutex kept_mutex_;
  std::deque<std::pair<Event, std::shared_ptr<void>>> kept_;
};

}  // namespace

Device* CudaDevice(int number) {
  static std::mutex mutex;
  static auto& gpus = *new std::map<int, std::unique_ptr<Gpu>>;
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Gpu>& gpu = gpus[number];
  if (!gpu) gpu = std::make_unique<Gpu>(number);
  return gpu.get();
}

}  // namespace poseidon

bool poseidon_is_driver_too_old(int* driver, int* compiler) {
  if (cudaDriverGetVersion(driver) != cudaSuccess) *driver = 0;
  *compiler = CUDART_VERSION;
  // Machine code needs a driver of its major version, whatever the minor one. Without a driver there are no GPUs.
  return *driver > 0 && *driver / 1000 < *compiler / 1000;
}
