// A GPU without a GPU: its streams go on when the test says so, or on a thread, as late as they may, and its memory
// cannot be read by the host.

#ifndef POSEIDON_TESTS_NATIVE_FAKE_DEVICE_H_
#define POSEIDON_TESTS_NATIVE_FAKE_DEVICE_H_

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "device.h"
#include "sum.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace poseidon {

class FakeDevice : public Device {
 public:
  using Work = std::function<void()>;

  FakeDevice() : down_(MakeStream()), up_(MakeStream()), across_(MakeStream()) {}
  ~FakeDevice() override {
    is_over_ = true;
    if (thread_.joinable()) thread_.join();
    for (const Memory& memory : memory_) memory.Unmap();
  }

  Stream MakeStream() {
    std::lock_guard<std::mutex> lock(mutex_);
    streams_.push_back(std::make_unique<std::deque<Item>>());
    return streams_.back().get();
  }

  // A number of bytes of the GPU's memory, which traps the host.
  void* Allocate(size_t bytes) override { return has_no_gpu_memory ? nullptr : Map(bytes, PROT_NONE); }
  void Free(void* data) override { Unmap(data); }

  // The same bytes for the work of streams.
  char* Inside(const void* outside) const {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const std::vector<Memory>* known : {&memory_, &opened_}) {
      for (const Memory& memory : *known) {
        const ptrdiff_t offset = static_cast<const char*>(outside) - memory.outside;
        if (offset >= 0 && offset < static_cast<ptrdiff_t>(memory.bytes)) return memory.inside + offset;
      }
    }
    if (has_no_host_memory) return static_cast<char*>(const_cast<void*>(outside));
    check::Fail(__FILE__, __LINE__, "a copy from or to memory that the GPU does not know", "");
  }

  // Puts a kernel into a stream.
  void Put(Stream stream, Work work) { Append(stream, {std::move(work), nullptr}); }

  // Does the next item of a stream that may go on; returns whether there is one.
  bool Advance(std::mt19937* random) {
    Item item;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      std::vector<std::deque<Item>*> able;
      for (const auto& stream : streams_) {
        if (!stream->empty() && (!stream->front().awaited || *stream->front().awaited)) able.push_back(stream.get());
      }
      if (able.empty()) return false;
      std::deque<Item>* stream = able[(*random)() % able.size()];
      item = std::move(stream->front());
      stream->pop_front();
    }
    if (item.work) item.work();
    return true;
  }

  // Lets a thread advance the streams from now on.
  void RunAlone(unsigned seed) {
    thread_ = std::thread([this, random = std::mt19937(seed)]() mutable {
      while (!is_over_) {
        if (!Advance(&random)) std::this_thread::yield();
        if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
      }
    });
  }

  // Whether work of a stream is under way.
  bool IsWorking(Stream stream) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return !static_cast<std::deque<Item>*>(stream)->empty();
  }

  void FailNow(const std::string& reason) {
    std::lock_guard<std::mutex> lock(mutex_);
    failure_ = reason;
  }
  size_t host_blocks() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return host_blocks_;
  }

  bool has_no_host_memory = false;  // copies are then from and to any of the host's
  bool has_no_gpu_memory = false;   // for more than there is
  bool can_export = false;

  Stream down() const override { return down_; }
  Stream up() const override { return up_; }
  Stream across() const override { return across_; }

  Event Record(Stream stream) override {
    auto place = std::make_shared<Place>();
    if (stream == down_) place->copies = num_down_;
    Append(stream, {[place] { place->is_passed = true; }, nullptr});
    return place;
  }
  void Wait(Stream stream, const Event& event) override {
    Append(stream, {nullptr, std::shared_ptr<std::atomic<bool>>(event, &static_cast<Place*>(event.get())->is_passed)});
  }
  bool IsDone(const Event& event) override {
    auto* place = static_cast<Place*>(event.get());
    if (!place->is_passed || !failure().empty()) return false;
    for (; num_known_ < place->copies; ++num_known_, poisoned_.pop_front()) {
      Poison(poisoned_.front().first, poisoned_.front().second, false);
    }
    return true;
  }

  void Copy(Stream stream, void* to, const void* from, size_t bytes) override {
    if (stream == down_ && !has_no_host_memory) {  // the host must not touch it before the copy is known to be done
      std::memset(Inside(to), 0xcd, bytes);
      Poison(to, bytes, true);
      poisoned_.emplace_back(to, bytes);
      ++num_down_;
    }
    char* const target = Inside(to);
    const char* const source = Inside(from);
    Append(stream, {[target, source, bytes] { std::memcpy(target, source, bytes); }, nullptr});
  }

  void Sum(Stream stream, DataType dtype, const std::vector<Summand>& inputs, size_t bytes, void* output) override {
    std::vector<Summand> inside;
    for (const Summand& input : inputs) inside.push_back({Inside(input.data), input.dtype});
    Append(stream, {[dtype, inside, bytes, to = Inside(output)] { SumInOrder(dtype, inside, bytes, to); }, nullptr});
  }

  void SumRows(Stream stream, DataType dtype, const void* values, int64_t columns, const RowLists& lists,
               void* output) override {
    const RowLists inside = {reinterpret_cast<const int64_t*>(Inside(lists.rows)),
                             reinterpret_cast<const int64_t*>(Inside(lists.begins)), lists.count};
    Append(stream, {[dtype, from = Inside(values), columns, inside, to = Inside(output)] {
                      poseidon::SumRows(dtype, from, columns, inside, to);
                    },
                    nullptr});
  }

  void Convert(Stream stream, DataType dtype, const void* from, int64_t count, DataType out_dtype, void* out) override {
    Append(stream,
           {[=, from = Inside(from), to = Inside(out)] { poseidon::Convert(dtype, from, count, out_dtype, to); },
            nullptr});
  }

  // Memory is opened by where it is, which is in this process.
  std::string Export(void* data) override {
    if (!can_export) return "";
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find_if(memory_.begin(), memory_.end(), [&](const Memory& each) {
      return each.outside <= data && data < each.outside + each.bytes;
    });
    return {reinterpret_cast<const char*>(&*found), sizeof(Memory)};
  }
  void* Open(const std::string& handle) override {
    if (!can_export) return nullptr;
    std::lock_guard<std::mutex> lock(mutex_);
    Memory memory;
    std::memcpy(&memory, handle.data(), sizeof(memory));
    opened_.push_back(memory);
    return memory.outside;
  }
  void Close(void* data) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto is_it = [&](const Memory& each) { return each.outside == data; };
    EXPECT(std::count_if(opened_.begin(), opened_.end(), is_it) == 1, "memory is closed that was not opened");
    opened_.erase(std::find_if(opened_.begin(), opened_.end(), is_it));
  }

  void KeepUntilDone(Stream stream, std::shared_ptr<void> owner) override {
    Append(stream, {[owner = std::move(owner)] {}, nullptr});
  }

  void Release() override {}

  void* AllocateHost(size_t bytes) override {
    if (has_no_host_memory) return nullptr;
    void* const data = Map(bytes, PROT_READ | PROT_WRITE);
    std::lock_guard<std::mutex> lock(mutex_);
    ++host_blocks_;
    return data;
  }
  void FreeHost(void* data) override {
    Unmap(data);
    std::lock_guard<std::mutex> lock(mutex_);
    --host_blocks_;
  }
  std::string failure() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
  }

 private:
  struct Item {
    Work work;
    std::shared_ptr<std::atomic<bool>> awaited;  // null: nothing
  };
  struct Place {
    std::atomic<bool> is_passed{false};
    size_t copies = 0;  // of those to the host, before it
  };
  // Mapped twice: where the host sees it, and where the GPU does.
  struct Memory {
    char* outside;
    char* inside;
    size_t bytes;

    void Unmap() const {
      Poison(outside, bytes, false);
      munmap(outside, bytes);
      munmap(inside, bytes);
    }
  };

  void* Map(size_t bytes, int protection) {
    const int file = memfd_create("gpu", 0);
    const size_t pages = std::max<size_t>(bytes, 1);
    EXPECT_EQ(ftruncate(file, static_cast<off_t>(pages)), 0, "the memory of a file");
    Memory memory = {static_cast<char*>(mmap(nullptr, pages, protection, MAP_SHARED, file, 0)),
                     static_cast<char*>(mmap(nullptr, pages, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)), pages};
    close(file);
    EXPECT(memory.outside != MAP_FAILED && memory.inside != MAP_FAILED, "memory that is mapped twice");
    std::lock_guard<std::mutex> lock(mutex_);
    memory_.push_back(memory);
    return memory.outside;
  }

  void Unmap(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto memory = memory_.begin(); memory != memory_.end(); ++memory) {
      if (memory->outside != data) continue;
      memory->Unmap();
      memory_.erase(memory);
      return;
    }
    check::Fail(__FILE__, __LINE__, "memory is freed that was not allocated", "");
  }

  void Append(Stream stream, Item item) {
    std::lock_guard<std::mutex> lock(mutex_);
    static_cast<std::deque<Item>*>(stream)->push_back(std::move(item));
  }

  static void Poison([[maybe_unused]] const void* data, [[maybe_unused]] size_t bytes, [[maybe_unused]] bool is_on) {
#if defined(__SANITIZE_ADDRESS__)
    if (is_on) {
      __asan_poison_memory_region(data, bytes);
    } else {
      __asan_unpoison_memory_region(data, bytes);
    }
#endif
  }

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<std::deque<Item>>> streams_;
  std::vector<Memory> memory_, opened_;  // of this GPU and the host; of others' GPUs
  std::string failure_;
  Stream down_, up_, across_;
  std::deque<std::pair<const void*, size_t>> poisoned_;  // by copies to the host that may be under way
  size_t num_down_ = 0, num_known_ = 0;                  // such copies: all, and those known to be done
  std::atomic<bool> is_over_{false};
  size_t host_blocks_ = 0;
  std::thread thread_;
};

}  // namespace poseidon

#endif  // POSEIDON_TESTS_NATIVE_FAKE_DEVICE_H_
