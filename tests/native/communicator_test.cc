// Communicators with their progress threads, used from several threads at a time, for the thread sanitizer.

#include "communicator.h"

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "job.h"
#include "loopback_transport.h"

using namespace poseidon;

namespace {

std::vector<std::unique_ptr<Communicator>> Join(int size, Options options = {}) {
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (auto& transport : MakeLoopbackTransports(size, {})) {
    auto shared = std::make_shared<std::unique_ptr<Transport>>(std::move(transport));
    ranks.push_back(std::make_unique<Communicator>([shared] { return std::move(*shared); }, options,
                                                   /*startup_timeout_s=*/30));
  }
  return ranks;
}

// Counts completed exchanges, for which another thread waits.
class Ends {
 public:
  Done Next() {
    return [this](const std::string& error) {
      std::lock_guard<std::mutex> lock(mutex_);
      ++count_;
      if (!error.empty()) error_ = error;
      changed_.notify_all();
    };
  }
  // Waits for `count` exchanges; returns one of their errors, empty if none.
  std::string WaitFor(int count) {
    std::unique_lock<std::mutex> lock(mutex_);
    EXPECT(changed_.wait_for(lock, std::chrono::seconds(60), [&] { return count_ >= count; }), "exchanges hang");
    return error_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
  std::string error_;
};

}  // namespace

TEST(ThreadsSubmitWhileOthersReadCounters) {
  const int size = 3, threads = 3, steps = 20;
  Options options;
  options.kv_pair_bytes = 64 << 10;
  auto ranks = Join(size, options);
  std::atomic<bool> is_over{false};
  std::thread reader([&] {
    while (!is_over) {
      for (auto& rank : ranks) {
        rank->events().Record(100);
        EXPECT(!rank->StatisticsJson().empty() && !rank->events().Json().empty() && rank->failure().empty(), "");
      }
    }
  });
  std::vector<std::thread> workers;
  std::atomic<int> wrong{0};
  for (auto& rank : ranks) {
    for (int thread = 0; thread < threads; ++thread) {
      workers.emplace_back([&, thread] {
        for (int step = 0; step < steps; ++step) {
          Ends ends;
          std::vector<float> small(10, 1), large(50000, 2);
          const std::string name = std::to_string(thread);
          Exchange exchange = SumInPlace("small" + name, &small);
          exchange.group = {"group" + name, 2};
          rank->Submit(exchange, ends.Next());
          exchange = SumInPlace("large" + name, &large);
          exchange.group = {"group" + name, 2};
          rank->Submit(exchange, ends.Next());
          wrong += !ends.WaitFor(2).empty() || small[9] != size || large[49999] != 2 * size;
        }
      });
    }
  }
  for (std::thread& worker : workers) worker.join();
  EXPECT_EQ(wrong.load(), 0, "");
  std::vector<std::thread> leaving;
  for (auto& rank : ranks) leaving.emplace_back([&] { wrong += !rank->Goodbye().empty(); });
  for (std::thread& thread : leaving) thread.join();
  is_over = true;
  reader.join();
  EXPECT_EQ(wrong.load(), 0, "");
}

TEST(AnAbortEndsWhatAllRanksHaveSubmitted) {
  for (int round = 0; round < 5; ++round) {
    auto ranks = Join(3);
    Ends ends;
    // Memory that the network may still use after a failure is kept.
    static auto& kept = *new std::vector<std::unique_ptr<std::vector<float>>>;
    std::vector<std::thread> threads;
    for (int rank : {0, 1}) {
      kept.push_back(std::make_unique<std::vector<float>>(100000));
      std::vector<float>* value = kept.back().get();
      threads.emplace_back([&, rank, value] { ranks[rank]->Submit(SumInPlace("x", value), ends.Next()); });
    }
    threads.emplace_back([&] { ranks[2]->Abort("no more", /*seconds=*/10); });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(ends.WaitFor(2), "no more", "");
    for (auto& rank : ranks) EXPECT_EQ(rank->Goodbye(), "no more", "");
  }
}

TEST(ATransportThatFailsOrDoesNotOpenIsAnError) {
  std::string reason;
  try {
    Communicator([]() -> std::unique_ptr<Transport> { throw TransportError("no network"); }, {}, 30);
  } catch (const std::runtime_error& error) {
    reason = error.what();
  }
  EXPECT_EQ(reason, "no network", "");
}

TEST(KvPairsThatAreTooSmallAreRefused) {
  for (int64_t bytes : {int64_t{-1}, int64_t{0}, int64_t{4095}}) {
    Options options;
    options.kv_pair_bytes = bytes;
    std::string reason;
    try {
      Join(1, options);
    } catch (const std::runtime_error& error) {
      reason = error.what();
    }
    EXPECT_HOLDS(reason, "kv_pair_bytes=" + std::to_string(bytes) + ", expected 4096 or more");
  }
}
