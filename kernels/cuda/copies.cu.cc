// The streams, events and copies of one GPU. The tests run what calls them, on a GPU of their own: these lines need a
// real one.
//
// Tests: tests/native/staging_test.cc.

#include "copies.h"

#include <cuda_runtime_api.h>

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace poseidon {
namespace {

class Gpu : public Device {
 public:
  explicit Gpu(int number) : number_(number) {
    const Current current(this);
    int lowest = 0, highest = 0;
    Check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "no priorities of streams");
    for (cudaStream_t* stream : {&down_, &up_}) {
      Check(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, highest), "no stream for copies");
    }
  }

  Stream down() const override { return down_; }
  Stream up() const override { return up_; }

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
  cudaStream_t down_ = nullptr, up_ = nullptr;
  mutable std::mutex mutex_;  // guards these two
  std::string failure_;
  std::vector<cudaEvent_t> events_;  // that nobody uses
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
