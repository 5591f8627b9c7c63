// The exchange ops of a GPU without a GPU: chosen by the node attribute _kernel="emulated_gpu", they move the tensors
// of CPUs as those of GPUs are moved, by threads in place of copy engines. For tests and rehearsals.
//
// Tests: tests/communicator/test_staging.py, tests/graphs/test_pipeline_fuzz.py.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device.h"
#include "exchange_kernels.h"
#include "gathered_rows.h"
#include "send_recv_kernels.h"
#include "shard_kernels.h"
#include "slices_kernels.h"
#include "staging.h"
#include "sum.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/denormal.h"

namespace poseidon {
namespace {

using tensorflow::OpKernelContext;
using Work = std::function<void()>;

// Work that is done in its order, by a thread of its own.
class Queue {
 public:
  Queue() {
    std::thread([this] { Run(); }).detach();
  }

  void Put(Work work) {
    std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back(std::move(work));
    has_work_.notify_one();
  }

 private:
  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      // Not wait(): see emulated_ops.cc.
      while (!has_work_.wait_for(lock, std::chrono::hours(1), [this] { return !waiting_.empty(); })) {
      }
      Work work = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      work();
      work = nullptr;  // without the lock, which may be wanted for what it owns
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable has_work_;
  std::deque<Work> waiting_;
};

class EmulatedGpu : public Device {
 public:
  static EmulatedGpu& Instance() {
    static auto* instance = new EmulatedGpu;  // never destroyed: its threads wait until the process ends
    return *instance;
  }

  Stream down() const override { return &down_; }
  Stream up() const override { return &up_; }
  Stream across() const override { return &across_; }

  Event Record(Stream stream) override {
    auto place = std::make_shared<Place>();
    Put(stream, [place] { place->Pass(); });
    return place;
  }
  void Wait(Stream, const Event&) override {}  // see WhenDone
  bool IsDone(const Event& event) override { return static_cast<Place*>(event.get())->is_passed; }
  void Copy(Stream stream, void* to, const void* from, size_t bytes) override {
    Put(stream, [=] { std::memcpy(to, from, bytes); });
  }
  void Sum(Stream stream, DataType dtype, const std::vector<Summand>& inputs, size_t bytes, void* output) override {
    Put(stream, [=] { SumInOrder(dtype, inputs, bytes, output); });
  }
  void SumRows(Stream stream, DataType dtype, const void* values, int64_t columns, const RowLists& lists,
               void* output) override {
    Put(stream, [=] {
      const tensorflow::port::ScopedDontFlushDenormal as_on_gpus;
      poseidon::SumRows(dtype, values, columns, lists, output);
    });
  }
  void Convert(Stream stream, DataType dtype, const void* from, int64_t count, DataType out_dtype, void* out) override {
    Put(stream, [=] {
      const tensorflow::port::ScopedDontFlushDenormal as_on_gpus;
      poseidon::Convert(dtype, from, count, out_dtype, out);
    });
  }
  void KeepUntilDone(Stream stream, std::shared_ptr<void> owner) override {
    Put(stream, [owner = std::move(owner)] {});
  }
  void Release() override {}
  void* AllocateHost(size_t bytes) override { return ::operator new(bytes, kLine, std::nothrow); }
  void FreeHost(void* data) override { ::operator delete(data, kLine); }

  // Files in memory, which other processes find by their numbers.
  void* Allocate(size_t bytes) override {
    const int file = memfd_create("emulated_gpu", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return nullptr;
    void* const data = Map(file, bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    if (data) files_[data] = {getpid(), file, bytes, data};
    return data;
  }
  void Free(void* data) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = files_.find(data);
    munmap(data, found->second.bytes);
    close(found->second.number);
    files_.erase(found);
  }
  std::string Export(void* data) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return {reinterpret_cast<const char*>(&files_.at(data)), sizeof(File)};
  }
  void* Open(const std::string& handle) override {
    File file;
    if (handle.size() != sizeof(file)) return nullptr;
    std::memcpy(&file, handle.data(), sizeof(file));
    if (file.process == getpid()) return file.data;
    const std::string path = "/proc/" + std::to_string(file.process) + "/fd/" + std::to_string(file.number);
    const int number = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (number < 0) return nullptr;
    void* const data = Map(number, file.bytes);
    close(number);
    std::lock_guard<std::mutex> lock(mutex_);
    if (data) opened_[data] = file.bytes;
    return data;
  }
  void Close(void* data) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (const auto found = opened_.find(data); found != opened_.end()) {
      munmap(data, found->second);
      opened_.erase(found);
    }
  }

  std::string failure() const override { return ""; }

  // Calls `then` when an event is done, where a GPU's stream would wait for it.
  static void WhenDone(const Event& event, Work then) { static_cast<Place*>(event.get())->WhenPassed(std::move(then)); }

 private:
  class Place {
   public:
    void Pass() {
      Work then;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        is_passed = true;
        then = std::move(then_);
      }
      if (then) then();
    }
    void WhenPassed(Work then) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!is_passed) {
          then_ = std::move(then);
          return;
        }
      }
      then();
    }

    std::atomic<bool> is_passed{false};

   private:
    std::mutex mutex_;
    Work then_;
  };
  static constexpr std::align_val_t kLine{64};
  struct File {
    pid_t process;
    int number;
    size_t bytes;
    void* data;  // in its process
  };

  // The framework's stream is null: what is put into it is done at once.
  static void Put(Stream stream, Work work) {
    if (stream) {
      static_cast<Queue*>(stream)->Put(std::move(work));
    } else {
      work();
    }
  }

  static void* Map(int file, size_t bytes) {
    void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    return data == MAP_FAILED ? nullptr : data;
  }

  mutable Queue down_, up_, across_;
  std::mutex mutex_;  // guards these two
  std::map<void*, File> files_;
  std::map<void*, size_t> opened_;  // of other processes
};

std::shared_ptr<OnDevice> PlaceOnEmulatedGpu() {
  EmulatedGpu& gpu = EmulatedGpu::Instance();
  return std::make_shared<OnDevice>(&gpu, nullptr, gpu.Record(nullptr));
}

class EmulatedSendKernel : public SendKernel {
 public:
  using SendKernel::SendKernel;

 protected:
  std::shared_ptr<OnDevice> Place(OpKernelContext*) const override { return PlaceOnEmulatedGpu(); }
};

class EmulatedRecvKernel : public RecvKernel {
 public:
  using RecvKernel::RecvKernel;

 protected:
  void AwaitSum(OpKernelContext*, const Ticket& ticket, std::function<void()> then) override {
    EmulatedGpu::WhenDone(ticket.on_device()->complete, std::move(then));
  }

  void CopyFactor(OpKernelContext*, const std::shared_ptr<Ticket>& ticket, size_t factor, char* output) override {
    CopyRowsToGpu(ticket->gathered().parts[factor], ticket->on_device()->device, nullptr, ticket, output);
  }
};

template <class Kernel>
class OnEmulatedGpu : public Kernel {
 public:
  using Kernel::Kernel;

 protected:
  std::shared_ptr<OnDevice> Place(OpKernelContext*) const override { return PlaceOnEmulatedGpu(); }

  void Await(OpKernelContext*, const OnDevice& place, Work then) const override {
    EmulatedGpu::WhenDone(place.complete, std::move(then));
  }
};

class EmulatedDenseSlicesKernel : public DenseSlicesKernel {
 public:
  using DenseSlicesKernel::DenseSlicesKernel;

 protected:
  std::shared_ptr<OnDevice> Place(OpKernelContext*) const override { return PlaceOnEmulatedGpu(); }
};

class EmulatedShardKernel : public ShardKernel {
 public:
  using ShardKernel::ShardKernel;

 protected:
  std::shared_ptr<OnDevice> Place(OpKernelContext*) const override { return PlaceOnEmulatedGpu(); }
};

constexpr char kLabel[] = "emulated_gpu";
REGISTER_KERNEL_BUILDER(Name("PoseidonSend").Device(tensorflow::DEVICE_CPU).Label(kLabel), EmulatedSendKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonRecv").Device(tensorflow::DEVICE_CPU).Label(kLabel), EmulatedRecvKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonSync").Device(tensorflow::DEVICE_CPU).Label(kLabel), OnEmulatedGpu<SyncKernel>);
REGISTER_KERNEL_BUILDER(Name("PoseidonAllReduce").Device(tensorflow::DEVICE_CPU).Label(kLabel),
                        OnEmulatedGpu<SumKernel>);
REGISTER_KERNEL_BUILDER(Name("PoseidonBroadcast").Device(tensorflow::DEVICE_CPU).Label(kLabel),
                        OnEmulatedGpu<BroadcastKernel>);
REGISTER_KERNEL_BUILDER(Name("PoseidonAllGather").Device(tensorflow::DEVICE_CPU).Label(kLabel),
                        OnEmulatedGpu<GatherKernel>);
REGISTER_KERNEL_BUILDER(Name("PoseidonShard").Device(tensorflow::DEVICE_CPU).Label(kLabel), EmulatedShardKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonReduceScatter").Device(tensorflow::DEVICE_CPU).Label(kLabel),
                        OnEmulatedGpu<ReduceScatterKernel>);
REGISTER_KERNEL_BUILDER(Name("PoseidonGatherShards").Device(tensorflow::DEVICE_CPU).Label(kLabel),
                        OnEmulatedGpu<GatherShardsKernel>);
REGISTER_KERNEL_BUILDER(Name("PoseidonSyncSlices").Device(tensorflow::DEVICE_CPU).Label(kLabel),
                        OnEmulatedGpu<SyncSlicesKernel>);
REGISTER_KERNEL_BUILDER(Name("PoseidonDenseSlices").Device(tensorflow::DEVICE_CPU).Label(kLabel),
                        EmulatedDenseSlicesKernel);

}  // namespace
}  // namespace poseidon
