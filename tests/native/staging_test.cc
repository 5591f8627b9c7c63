// Tensors in a GPU's memory: exchanged in pieces, in any order in which copies and messages can come, and with
// failures.

#include "staging.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
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

TEST(AGpuThatStopsCopyingFactorsIsNamed) {
  Options options = SmallOptions({{}, 1, {}});
  options.timeout_s = 0.01;
  std::vector<std::unique_ptr<GpuRank>> gpus;
  Job job(2, {0, 1}, options);
  for (int rank : {0, 1}) {
    gpus.push_back(std::make_unique<GpuRank>(rank, 2, 1 << 11));
    gpus[rank]->Submit(
        11, 0, [](const Exchange&, const Done&) {},
        [&](const Factors& factors, const FactorsDone& done) {
          job.protocol(rank).StartFactors(factors, done, Clock::now());
        });
    while (gpus[rank]->device.Advance(&job.random())) continue;  // computes them, and copies nothing yet
  }
  for (int turn = 0; turn < 1000; ++turn) {
    gpus[1]->device.Advance(&job.random());
    for (int rank : {0, 1}) {
      job.protocol(rank).Poll();
      job.protocol(rank).Flush();
    }
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  job.protocol(0).CheckDeadlines();
  EXPECT_HOLDS(job.rank(0).failure,
               "Rank 0 waited 0.01 s for its GPU to copy what belongs to exchange 'site 11' (gather)");
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

// What is copied when a rank leaves must stay until it has been.
TEST(RanksMayLeaveWithCopiesUnderWay) {
  static auto& gpus = *new std::vector<std::unique_ptr<GpuRank>>;  // outlive the progress threads
  const std::vector<int> nodes = {0, 0, 1};
  const size_t size = nodes.size();
  for (const auto stream : {&Device::down, &Device::up, &Device::across}) {
    std::vector<std::unique_ptr<Communicator>> ranks;
    const size_t first = gpus.size();
    for (auto& transport : MakeLoopbackTransports(static_cast<int>(size), nodes)) {
      gpus.push_back(std::make_unique<GpuRank>(static_cast<int>(ranks.size()), static_cast<int>(size), ~0U));
      gpus.back()->device.can_export = true;
      auto open = [opened = std::make_shared<std::unique_ptr<Transport>>(std::move(transport))] {
        return std::move(*opened);
      };
      ranks.push_back(std::make_unique<Communicator>(open, SmallOptions({nodes, 2, {}}), 30));
    }
    std::mt19937 random(first);
    const auto advance = [&] {
      bool has_advanced = false;
      for (size_t i = first; i < gpus.size(); ++i) has_advanced |= gpus[i]->device.Advance(&random);
      std::this_thread::yield();
      return has_advanced;
    };
    const auto is_over = [](const auto& gpu) { return !gpu->pending && !gpu->unread; };
    for (int step = 0; step < 2; ++step) {
      while (!std::all_of(gpus.begin() + first, gpus.end(), is_over)) advance();  // a step that opens the windows
      for (const auto& [which, tensor] : gpus[first]->tensors) {
        for (size_t rank = 0; rank < size; ++rank) {
          gpus[first + rank]->Submit(
              which, step, [&](const Exchange& exchange, const Done& done) { ranks[rank]->Submit(exchange, done); },
              [&](const Factors& factors, const FactorsDone& done) { ranks[rank]->SubmitFactors(factors, done); });
        }
      }
    }
    const FakeDevice& device = gpus[first]->device;
    while (!device.IsWorking((device.*stream)())) advance();
    for (int turn = 0; turn < 1000; ++turn) {  // of the other GPUs, whose memory this one may be copying from
      for (size_t i = first + 1; i < gpus.size(); ++i) gpus[i]->device.Advance(&random);
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    ranks.clear();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // they leave meanwhile
    while (advance()) continue;
  }
}
