// Ranks whose tensors are in the memory of GPUs that the test plays.

#ifndef POSEIDON_TESTS_NATIVE_GPU_JOB_H_
#define POSEIDON_TESTS_NATIVE_GPU_JOB_H_

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "fake_device.h"
#include "gather_exchanges.h"
#include "job.h"
#include "sum.h"
#include "text.h"

namespace poseidon {

inline constexpr size_t kCounts[] = {0, 1, 700, 9000, 17000, 33001, 40000};  // some in several KV pairs

// Those of factors: few, or so many that a piece holds no row.
inline size_t Columns(size_t which) { return which > 6 ? 50 : 17000; }

inline float Value(int rank, size_t i, int step) { return static_cast<float>((i % 13) + 3 * rank + step); }

// The bits of a small integer in bfloat16 are the upper ones of those in float.
inline uint16_t Bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

// One tensor that a rank exchanges, in its GPU's memory.
struct Tensor {
  enum Kind { kSum, kSumInPlace, kSumOfNarrow, kLeftOut, kBroadcast, kFactors };
  Kind kind;
  size_t count;
  void *input, *output;
  bool is_on_host = false;
};

inline Tensor::Kind KindOf(size_t which, int rank) {
  if (which % 6 == 3) return rank == 1 ? Tensor::kLeftOut : Tensor::kSum;
  return static_cast<Tensor::Kind>(which % 6);
}

// None on rank 0, or more than a piece holds.
inline size_t FactorRows(size_t which, int rank) { return (which > 6 ? 700 : 0) + 2 * static_cast<size_t>(rank); }

// A rank whose tensors are on a GPU, whose stream makes them one after the other.
class GpuRank {
 public:
  // `chosen` says which tensors there are, `on_host` which of them are in the host's memory.
  GpuRank(int rank, int size, unsigned chosen, unsigned on_host = 0)
      : rank_(rank), size_(size), stream_(device.MakeStream()) {
    for (size_t which = 0; which < 2 * std::size(kCounts); ++which) {
      if (!(chosen >> which & 1)) continue;
      const bool is_factors = which % 6 == Tensor::kFactors;
      const size_t count = is_factors ? Columns(which) * FactorRows(which, rank) : kCounts[which / 2];
      const bool is_on_host = on_host >> which & 1;
      auto allocate = [&] {
        return is_on_host ? device.AllocateHost(count * sizeof(float)) : device.Allocate(count * sizeof(float));
      };
      Tensor tensor = {KindOf(which, rank), count, allocate(), nullptr, is_on_host};
      const bool is_in_place = tensor.kind == Tensor::kSumInPlace || which == 6 + Tensor::kBroadcast;
      tensor.output = is_in_place ? tensor.input : allocate();
      tensors.emplace(which, tensor);
    }
  }

  // Starts an exchange as the framework does: when its kernels are in the stream, and long before they are done.
  template <typename Start, typename StartFactors>
  void Submit(size_t which, int step, const Start& start, const StartFactors& start_factors) {
    const Tensor& tensor = tensors.at(which);
    std::shared_ptr<OnDevice> on_device;
    if (tensor.is_on_host) {
      Write(tensor, which, step);
    } else {
      device.Put(stream_, [this, &tensor, which, step] { Write(tensor, which, step); });
      on_device = std::make_shared<OnDevice>(&device, stream_, device.Record(stream_));
    }
    ++pending;
    if (tensor.kind == Tensor::kFactors) {
      Factors factors;
      factors.site = "site " + std::to_string(which);
      factors.form = "U";
      const size_t row_bytes = Columns(which) * sizeof(float);
      factors.parts.push_back({tensor.input, tensor.count * sizeof(float), row_bytes, sizeof(float)});
      factors.on_device = on_device;
      return start_factors(factors, [this, which, step](const std::string& error, const GatheredFactors& gathered) {
        Finish(error);
        if (error.empty()) CheckFactors(gathered, which, step);
      });
    }
    Exchange exchange;
    exchange.site = "site " + std::to_string(which);
    exchange.count = static_cast<int64_t>(tensor.count);
    exchange.input = tensor.input;
    exchange.output = tensor.output;
    exchange.priority = static_cast<int>(which % 4);
    if (tensor.kind == Tensor::kSumOfNarrow) exchange.input_dtype = DataType::kBfloat16;
    if (tensor.kind == Tensor::kBroadcast) exchange.root = static_cast<int>(which / 6) % size_;
    exchange.contributes = tensor.kind != Tensor::kLeftOut;
    exchange.on_device = on_device;
    if (which == differs_at && exchange.count > 1) --exchange.count;  // which other ranks find out
    start(exchange, [this, which, step, on_device](const std::string& error) {
      if (error.empty()) {
        if (on_device) device.Wait(stream_, on_device->complete);
        ++unread;
        device.Put(stream_, [this, which, step] { Check(which, step); });
      }
      Finish(error);  // last: who sees that nothing is pending nor unread may begin the next step
    });
  }

  // The bytes that a step copies to the host, and to the GPU.
  std::pair<size_t, size_t> StepBytes() const {
    size_t down = 0, up = 0;
    for (const auto& [which, tensor] : tensors) {
      const bool is_root = tensor.kind == Tensor::kBroadcast && static_cast<int>(which / 6) % size_ == rank_;
      const bool gives = tensor.kind == Tensor::kBroadcast ? is_root : tensor.kind != Tensor::kLeftOut;
      const bool stays = tensor.kind == Tensor::kFactors && size_ == 1;
      if (gives && !stays) down += tensor.count * (tensor.kind == Tensor::kSumOfNarrow ? 2 : 4);
      const bool has_it = is_root && tensor.input == tensor.output;
      if (tensor.kind != Tensor::kFactors && !has_it) up += tensor.count * 4;
    }
    return {down, up};
  }

  FakeDevice device;
  std::map<size_t, Tensor> tensors;
  std::atomic<int> pending{0}, unread{0};
  std::atomic<int> failed{0};
  bool is_rough = false;                          // sums depend on the order in which they are added
  std::map<size_t, std::vector<float>> received;  // of these: what came last
  size_t differs_at = std::numeric_limits<size_t>::max();

 private:
  void Finish(const std::string& error) {
    if (!error.empty()) ++failed;
    --pending;
  }

  void Write(const Tensor& tensor, size_t which, int step) {
    char* const to = device.Inside(tensor.input);
    for (size_t i = 0; i < tensor.count; ++i) {
      const float value = Value(rank_, i + which, step) * (is_rough ? Roughness() : 1.0F);
      if (tensor.kind == Tensor::kSumOfNarrow) {
        const uint16_t narrow = Bfloat16(value);
        std::memcpy(to + 2 * i, &narrow, 2);
      } else {
        std::memcpy(to + 4 * i, &value, 4);
      }
    }
  }

  float Roughness() const { return std::pow(1e3F, static_cast<float>(rank_ % 3)) / 3; }

  void Check(size_t which, int step) {
    const Tensor& tensor = tensors.at(which);
    if (is_rough) {
      const auto* begin = reinterpret_cast<const float*>(device.Inside(tensor.output));
      received[which].assign(begin, begin + tensor.count);
      --unread;
      return;
    }
    const int root = static_cast<int>(which / 6) % size_;
    for (size_t i = 0; which != differs_at && i < tensor.count; ++i) {
      float expected = 0, found;
      for (int rank = 0; rank < size_; ++rank) {
        const bool adds = tensor.kind == Tensor::kBroadcast ? rank == root : KindOf(which, rank) != Tensor::kLeftOut;
        if (adds) expected += Value(rank, i + which, step);
      }
      std::memcpy(&found, device.Inside(tensor.output) + 4 * i, 4);
      EXPECT_EQ(found, expected, Text("tensor ", which, " of rank ", rank_, " at ", i, " in step ", step));
    }
    --unread;
  }

  void CheckFactors(const GatheredFactors& gathered, size_t which, int step) const {
    EXPECT(gathered.is_complete, "factors of all ranks");
    std::vector<float> expected, found;
    for (int rank = 0; rank < size_; ++rank) {
      const size_t count = Columns(which) * FactorRows(which, rank);
      for (size_t i = 0; i < count; ++i) expected.push_back(Value(rank, i + which, step));
    }
    for (const GatheredFactors::Rows& rows : gathered.parts[0]) {
      EXPECT(!rows.is_on_gpu || !tensors.at(which).is_on_host, "rows are in the host's memory if the rank's own are");
      const auto* begin = reinterpret_cast<const float*>(rows.is_on_gpu ? device.Inside(rows.data) : rows.data);
      found.insert(found.end(), begin, begin + rows.bytes / sizeof(float));
    }
    EXPECT(found == expected, Text("factors ", which, " of all ranks on rank ", rank_, " in step ", step));
  }

  const int rank_, size_;
  const Device::Stream stream_;
};

struct Arrangement {
  std::vector<int> nodes;
  int ranks_per_node;
  std::vector<int> servers;
};
inline const Arrangement kArrangements[] = {
    {{0}, 1, {}}, {{0, 1}, 1, {}}, {{0, 1, 2}, 1, {1}}, {{0, 0, 1}, 2, {}}, {{0, 0, 1, 1}, 2, {3, 0}}};

inline Options SmallOptions(const Arrangement& arrangement) {
  Options options;
  options.kv_pair_bytes = 64 << 10;
  options.servers = arrangement.servers;
  options.ranks_per_node = arrangement.ranks_per_node;
  options.staging_bytes = 1;  // the least that is possible
  return options;
}

// Ranks with GPUs: the test decides when a rank, a copy or a kernel goes on.
struct GpuJob {
  // Random tensors where `chosen` is empty.
  GpuJob(const Arrangement& arrangement, unsigned seed, std::optional<unsigned> chosen = {}, bool on_hosts = false)
      : job(static_cast<int>(arrangement.nodes.size()), arrangement.nodes, SmallOptions(arrangement), seed) {
    if (!chosen) chosen = Bits() & Bits();
    for (int rank = 0; rank < job.size(); ++rank) {
      gpus.push_back(std::make_unique<GpuRank>(rank, job.size(), *chosen, on_hosts ? Bits() & Bits() & Bits() : 0));
    }
  }
  // Copies may be under way, as those of a real GPU may: it is left before its memory is.
  ~GpuJob() {
    for (auto& gpu : gpus) Drain(gpu.get());
  }

  unsigned Bits() { return static_cast<unsigned>(job.random()()); }

  void Drain(GpuRank* gpu) {
    while (gpu->device.Advance(&job.random())) continue;
  }

  void Submit(int rank, size_t which, int step) {
    Protocol& protocol = job.protocol(rank);
    gpus[rank]->Submit(
        which, step, [&](const Exchange& exchange, const Done& done) { protocol.Start(exchange, done, Clock::now()); },
        [&](const Factors& factors, const FactorsDone& done) { protocol.StartFactors(factors, done, Clock::now()); });
  }

  void Turn() {
    const int rank = static_cast<int>(job.random()() % job.size());
    if (job.random()() % 2) {
      gpus[rank]->device.Advance(&job.random());
    } else {
      job.protocol(rank).Poll();
      job.protocol(rank).Flush();
    }
  }

  // All exchanges of a step, each rank's in its own order.
  std::vector<std::pair<int, size_t>> Starts() {
    std::vector<std::pair<int, size_t>> starts;
    for (int rank = 0; rank < job.size(); ++rank) {
      for (const auto& [which, tensor] : gpus[rank]->tensors) starts.emplace_back(rank, which);
    }
    std::shuffle(starts.begin(), starts.end(), job.random());
    return starts;
  }

  // Runs a step; `turns` are those between two exchanges that begin.
  void Step(int step, int turns) {
    for (const auto& [rank, which] : Starts()) {
      Submit(rank, which, step);
      for (int turn = turns; turn > 0; --turn) Turn();
    }
    for (int turn = 0; !IsDone(); ++turn) {
      EXPECT(turn < 1000000, "ranks and their GPUs wait for each other");
      Turn();
    }
  }

  bool IsDone() const {
    return std::all_of(gpus.begin(), gpus.end(), [](const auto& gpu) { return !gpu->pending && !gpu->unread; });
  }

  std::vector<std::unique_ptr<GpuRank>> gpus;  // outlive the ranks, which hold their memory
  Job job;
};

// How many schedules a test tries.
inline int Schedules([[maybe_unused]] int usual) {
#if defined(__SANITIZE_THREAD__)
  return 50;  // they have one thread
#else
  return std::getenv("POSEIDON_ALL_CELLS") ? 12000 : usual;
#endif
}

}  // namespace poseidon

#endif  // POSEIDON_TESTS_NATIVE_GPU_JOB_H_
