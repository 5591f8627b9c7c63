// Tensors in a GPU's memory: exchanged in pieces, in any order in which copies and messages can come, and with
// failures.

#include "staging.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "communicator.h"
#include "factors.h"
#include "fake_device.h"
#include "job.h"
#include "loopback_transport.h"
#include "sum.h"
#include "text.h"

using namespace poseidon;

namespace {

constexpr size_t kCounts[] = {0, 1, 700, 9000, 17000, 33001};  // some in several KV pairs
constexpr size_t kColumns = 50;

float Value(int rank, size_t i, int step) { return static_cast<float>((i % 13) + 3 * rank + step); }

// The bits of a small integer in bfloat16 are the upper ones of those in float.
uint16_t Bfloat16(float value) {
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
};

Tensor::Kind KindOf(size_t which, int rank) {
  if (which % 6 == 3) return rank == 1 ? Tensor::kLeftOut : Tensor::kSum;
  return static_cast<Tensor::Kind>(which % 6);
}

// None on rank 0, or more than a piece holds.
size_t FactorRows(size_t which, int rank) { return (which > 6 ? 700 : 0) + 2 * static_cast<size_t>(rank); }

// A rank whose tensors are on a GPU, whose stream makes them one after the other.
class GpuRank {
 public:
  // `chosen` says which tensors there are.
  GpuRank(int rank, int size, unsigned chosen) : rank_(rank), size_(size), stream_(device.MakeStream()) {
    for (size_t which = 0; which < 2 * std::size(kCounts); ++which) {
      if (!(chosen >> which & 1)) continue;
      const bool is_factors = which % 6 == Tensor::kFactors;
      const size_t count = is_factors ? kColumns * FactorRows(which, rank) : kCounts[which / 2];
      Tensor tensor = {KindOf(which, rank), count, device.Allocate(count * sizeof(float)), nullptr};
      const bool is_in_place = tensor.kind == Tensor::kSumInPlace || which == 6 + Tensor::kBroadcast;
      tensor.output = is_in_place ? tensor.input : device.Allocate(count * sizeof(float));
      tensors.emplace(which, tensor);
    }
  }

  // Starts an exchange as the framework does: when its kernels are in the stream, and long before they are done.
  template <typename Start, typename StartFactors>
  void Submit(size_t which, int step, const Start& start, const StartFactors& start_factors) {
    const Tensor& tensor = tensors.at(which);
    device.Put(stream_, [this, &tensor, which, step] { Write(tensor, which, step); });
    auto on_device = std::make_shared<OnDevice>(&device, stream_, device.Record(stream_));
    ++pending;
    if (tensor.kind == Tensor::kFactors) {
      Factors factors;
      factors.site = "site " + std::to_string(which);
      factors.form = "U";
      factors.parts.push_back({tensor.input, tensor.count * sizeof(float), kColumns * sizeof(float), sizeof(float)});
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
      Finish(error);
      if (!error.empty()) return;
      device.Wait(stream_, on_device->complete);
      ++unread;
      device.Put(stream_, [this, which, step] { Check(which, step); });
    });
  }

  // The bytes that a step copies to the host, and to the GPU.
  std::pair<size_t, size_t> StepBytes() const {
    size_t down = 0, up = 0;
    for (const auto& [which, tensor] : tensors) {
      const bool is_root = tensor.kind == Tensor::kBroadcast && static_cast<int>(which / 6) % size_ == rank_;
      const bool gives = tensor.kind == Tensor::kBroadcast ? is_root : tensor.kind != Tensor::kLeftOut;
      if (gives) down += tensor.count * (tensor.kind == Tensor::kSumOfNarrow ? 2 : 4);
      const bool has_it = is_root && tensor.input == tensor.output;
      if (tensor.kind != Tensor::kFactors && !has_it) up += tensor.count * 4;
    }
    return {down, up};
  }

  FakeDevice device;
  std::map<size_t, Tensor> tensors;
  std::atomic<int> pending{0}, unread{0};
  std::atomic<int> failed{0};
  size_t differs_at = std::numeric_limits<size_t>::max();

 private:
  void Finish(const std::string& error) {
    if (!error.empty()) ++failed;
    --pending;
  }

  void Write(const Tensor& tensor, size_t which, int step) {
    char* const to = device.Inside(tensor.input);
    for (size_t i = 0; i < tensor.count; ++i) {
      const float value = Value(rank_, i + which, step);
      if (tensor.kind == Tensor::kSumOfNarrow) {
        const uint16_t narrow = Bfloat16(value);
        std::memcpy(to + 2 * i, &narrow, 2);
      } else {
        std::memcpy(to + 4 * i, &value, 4);
      }
    }
  }

  void Check(size_t which, int step) {
    const Tensor& tensor = tensors.at(which);
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
    for (int rank = 0; rank < size_; ++rank) {
      const GatheredFactors::Rows& rows = gathered.parts[0][rank];
      EXPECT_EQ(rows.bytes, sizeof(float) * kColumns * FactorRows(which, rank), "the factors of a rank");
      for (size_t i = 0; i < rows.bytes / sizeof(float); ++i) {
        float found;
        std::memcpy(&found, rows.data + 4 * i, 4);
        EXPECT_EQ(found, Value(rank, i + which, step), Text("factors of rank ", rank, " at ", i));
      }
    }
  }

  const int rank_, size_;
  const Device::Stream stream_;
};

struct Arrangement {
  std::vector<int> nodes;
  int ranks_per_node;
  std::vector<int> servers;
};
const Arrangement kArrangements[] = {
    {{0}, 1, {}}, {{0, 1}, 1, {}}, {{0, 1, 2}, 1, {1}}, {{0, 0, 1}, 2, {}}, {{0, 0, 1, 1}, 2, {3, 0}}};

Options SmallOptions(const Arrangement& arrangement) {
  Options options;
  options.kv_pair_bytes = 64 << 10;
  options.servers = arrangement.servers;
  options.ranks_per_node = arrangement.ranks_per_node;
  options.staging_bytes = 1;  // the least that is possible
  return options;
}

// Ranks with GPUs: the test decides when a rank, a copy or a kernel goes on.
struct GpuJob {
  GpuJob(const Arrangement& arrangement, unsigned seed)
      : job(static_cast<int>(arrangement.nodes.size()), arrangement.nodes, SmallOptions(arrangement), seed) {
    const unsigned chosen = static_cast<unsigned>(job.random()()) & static_cast<unsigned>(job.random()());
    for (int rank = 0; rank < job.size(); ++rank) gpus.push_back(std::make_unique<GpuRank>(rank, job.size(), chosen));
  }
  // Copies may be under way, as those of a real GPU may: it is left before its memory is.
  ~GpuJob() {
    for (auto& gpu : gpus) Drain(gpu.get());
  }

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

  bool IsDone() const {
    return std::all_of(gpus.begin(), gpus.end(), [](const auto& gpu) { return !gpu->pending && !gpu->unread; });
  }

  std::vector<std::unique_ptr<GpuRank>> gpus;  // outlive the ranks, which hold their memory
  Job job;
};

int Schedules() {
#if defined(__SANITIZE_THREAD__)
  return 50;  // they have one thread
#else
  return std::getenv("POSEIDON_ALL_CELLS") ? 12000 : 600;
#endif
}

}  // namespace

TEST(TensorsOnGpusAreExchangedInPiecesInAnySchedule) {
  for (int seed = 0; seed < Schedules(); ++seed) {
    const Arrangement& arrangement = kArrangements[seed % std::size(kArrangements)];
    GpuJob gpu_job(arrangement, seed);
    for (int step = 0; step < 2; ++step) {
      for (const auto& [rank, which] : gpu_job.Starts()) {
        gpu_job.Submit(rank, which, step);
        for (int turn = seed % 7; turn > 0; --turn) gpu_job.Turn();
      }
      for (int turn = 0; !gpu_job.IsDone(); ++turn) {
        EXPECT(turn < 1000000, Text("seed ", seed, ": ranks and their GPUs wait for each other"));
        gpu_job.Turn();
      }
    }
    for (int rank = 0; rank < gpu_job.job.size(); ++rank) {
      const auto [down, up] = gpu_job.gpus[rank]->StepBytes();
      const StagingStatistics& statistics = *gpu_job.job.rank(rank).statistics.staging;
      EXPECT_EQ(gpu_job.gpus[rank]->failed.load(), 0, "failures");
      EXPECT_EQ(statistics.down_bytes.load(), 2 * down, "bytes from the GPU");
      EXPECT_EQ(statistics.up_bytes.load(), 2 * up, "bytes to the GPU");
    }
  }
}

TEST(FailuresEndWhatIsOnItsWayFromAndToGpus) {
  for (int seed = 0; seed < Schedules(); ++seed) {
    GpuJob gpu_job(kArrangements[seed % std::size(kArrangements)], seed);
    const auto starts = gpu_job.Starts();
    const size_t ends_at = gpu_job.job.random()() % (starts.size() + 1), size = gpu_job.gpus.size();
    const size_t first = gpu_job.job.random()() % size;
    if (seed % 3 == 2 && size > 1 && !starts.empty()) gpu_job.gpus[first]->differs_at = starts[0].second;
    auto end = [&] {
      if (seed % 3 == 0) gpu_job.gpus[first]->device.FailNow("its memory is broken");
      if (seed % 3 == 1) gpu_job.job.protocol(static_cast<int>(first)).Fail("enough", /*tell_peers=*/true);
    };
    for (size_t i = 0; i < starts.size(); ++i) {
      if (i == ends_at) end();
      gpu_job.Submit(starts[i].first, starts[i].second, 0);
      for (int turn = seed % 50; turn > 0; --turn) gpu_job.Turn();
    }
    if (ends_at == starts.size()) end();
    for (int turn = 0; !gpu_job.IsDone(); ++turn) {
      EXPECT(turn < 1000000, Text("seed ", seed, ": an exchange does not end"));
      gpu_job.Turn();
    }
    const std::string& failure = gpu_job.job.rank(static_cast<int>(first)).failure;
    const std::string expected[] = {Text("The GPU of rank ", first, " failed: its memory is broken."), "enough",
                                    "Ranks disagree about 'site "};
    if (gpu_job.gpus[first]->failed) EXPECT_HOLDS(failure, expected[seed % 3]);
  }
}

TEST(TensorsOnGpusAreExchangedWithoutPinnedMemory) {
  for (int seed = 0; seed < Schedules() / 10; ++seed) {
    GpuJob gpu_job(kArrangements[seed % std::size(kArrangements)], seed);
    for (const auto& gpu : gpu_job.gpus) gpu->device.has_no_host_memory = true;
    for (const auto& [rank, which] : gpu_job.Starts()) gpu_job.Submit(rank, which, 0);
    for (int turn = 0; !gpu_job.IsDone(); ++turn) {
      EXPECT(turn < 1000000, Text("seed ", seed, ": ranks and their GPUs wait for each other"));
      gpu_job.Turn();
    }
    for (int rank = 0; rank < gpu_job.job.size(); ++rank) {
      EXPECT_EQ(gpu_job.job.rank(rank).statistics.staging->pinned_bytes.load(), 0U, "pinned memory");
    }
  }
}

TEST(StagingMemoryIsLimitedAndFreedWithTheJob) {
  for (int jobs = 0; jobs < 2; ++jobs) {
    std::vector<std::unique_ptr<GpuRank>> gpus;
    std::vector<std::unique_ptr<Communicator>> ranks;
    const int size = 3;
    auto transports = MakeLoopbackTransports(size, {});
    for (int rank = 0; rank < size; ++rank) {
      gpus.push_back(std::make_unique<GpuRank>(rank, size, ~0U));
      gpus.back()->device.RunAlone(rank);
      auto open = [transport = std::make_shared<std::unique_ptr<Transport>>(std::move(transports[rank]))] {
        return std::move(*transport);
      };
      ranks.push_back(std::make_unique<Communicator>(open, SmallOptions({{}, 1, {}}), 30));
    }
    for (int step = 0; step < 3; ++step) {
      for (const auto& [which, tensor] : gpus[0]->tensors) {
        for (int rank = 0; rank < size; ++rank) {
          gpus[rank]->Submit(
              which, step, [&](const Exchange& exchange, const Done& done) { ranks[rank]->Submit(exchange, done); },
              [&](const Factors& factors, const FactorsDone& done) { ranks[rank]->SubmitFactors(factors, done); });
        }
      }
      for (const auto& gpu : gpus) {
        while (gpu->pending > 0 || gpu->unread > 0) std::this_thread::yield();
        EXPECT_EQ(gpu->failed.load(), 0, "failures");
      }
    }
    std::vector<std::thread> leaving;
    for (auto& rank : ranks) leaving.emplace_back([&rank] { EXPECT_EQ(rank->Goodbye(), "", "the end of a job"); });
    for (std::thread& thread : leaving) thread.join();
    ranks.clear();
    for (const auto& gpu : gpus) {
      for (int wait = 0; gpu->device.host_blocks() > 0; ++wait) {
        EXPECT(wait < 10000, "memory of the host that is not freed");
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
  }
}
