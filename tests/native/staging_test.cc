// Tensors in a GPU's memory: exchanged in pieces, in any order in which copies and messages can come, and with
// failures.

#include "staging.h"

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "communicator.h"
#include "gpu_job.h"
#include "loopback_transport.h"
#include "text.h"

using namespace poseidon;

TEST(TensorsOnGpusAreExchangedInPiecesInAnySchedule) {
  for (int seed = 0; seed < Schedules(600); ++seed) {
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
  for (int seed = 0; seed < Schedules(600); ++seed) {
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
  for (int seed = 0; seed < Schedules(600) / 10; ++seed) {
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
