// Ranks of a node whose GPUs reach each other's memory: what they add up, pass on and gather there, beside ranks that
// do not, in any order in which copies and messages can come, and with refusals and failures.

#include "gpu_links.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <iterator>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "gpu_job.h"
#include "text.h"

using namespace poseidon;

namespace {

const Arrangement kNodes[] = {{{0, 0}, 2, {}},           {{0, 0, 0}, 3, {2}},          {{0, 0, 1}, 2, {}},
                              {{0, 0, 1, 1}, 2, {3, 0}}, {{0, 0, 0, 1, 1}, 3, {2, 4}}, {{0, 0, 1, 1}, 2, {}}};

// Lets some ranks be without links, or without memory of the GPU for what others send.
void Vary(GpuJob* job, unsigned seed) {
  for (const auto& gpu : job->gpus) {
    gpu->device.can_export = seed % 4 == 0 || job->Bits() % 4 > 0;
    gpu->device.has_no_gpu_memory = seed % 4 > 0 && job->Bits() % 8 == 0;
  }
}

struct Bytes {
  uint64_t down, up, across, network;
};

Bytes BytesOf(GpuJob* job, int rank, const std::string& site) {
  Statistics& statistics = job->job.rank(rank).statistics;
  const StagingStatistics& staging = *statistics.staging;
  return {staging.down_bytes, staging.up_bytes, staging.across_bytes, statistics.Of(site).network_bytes};
}

}  // namespace

TEST(SumsAndFactorsAreRightWhateverWayTheirPartsTake) {
  for (int seed = 0; seed < Schedules(250); ++seed) {
    GpuJob job(kNodes[seed % std::size(kNodes)], seed, {}, /*on_hosts=*/true);
    Vary(&job, seed);
    for (int step = 0; step < 3; ++step) job.Step(step, seed % 7);
    for (const auto& gpu : job.gpus) EXPECT_EQ(gpu->failed.load(), 0, Text("failures with seed ", seed));
  }
}

// A rank has a dense gradient, or other factors: the others' pieces, of which a window here holds one, must not stay.
TEST(FactorsThatAreRefusedLeaveTheWindows) {
  static constexpr size_t kFactors = 11, kDense = 6;
  for (int seed = 0; seed < Schedules(250); ++seed) {
    GpuJob job(kNodes[seed % std::size(kNodes)], seed, 1U << kFactors | 1U << kDense, /*on_hosts=*/true);
    Vary(&job, seed);
    job.Step(0, 3);  // opens the windows
    const int size = job.job.size(), odd_one = static_cast<int>(job.Bits() % size);
    const bool has_none = job.Bits() % 2;
    std::vector<int> order(size);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), job.job.random());
    size_t refused = 0, dense = 0;
    for (int rank : order) {
      GpuRank& gpu = *job.gpus[rank];
      auto place = [&gpu](const Tensor& tensor) {
        const Device::Stream stream = gpu.device.MakeStream();
        return tensor.is_on_host ? nullptr : std::make_shared<OnDevice>(&gpu.device, stream, gpu.device.Record(stream));
      };
      auto start_dense = [&job, &gpu, &dense, rank, place] {
        const Tensor& tensor = gpu.tensors.at(kDense);
        Exchange exchange;
        exchange.site = "refused";
        exchange.count = static_cast<int64_t>(tensor.count);
        exchange.input = tensor.input;
        exchange.output = tensor.output;
        exchange.is_gradient = true;
        exchange.on_device = place(tensor);
        auto done = [&dense](const std::string& error) { dense += error.empty(); };
        job.job.protocol(rank).Start(exchange, done, Clock::now());
      };
      if (has_none && rank == odd_one) {
        start_dense();
        continue;
      }
      const Tensor& tensor = gpu.tensors.at(kFactors);
      Factors factors;
      factors.site = "refused";
      factors.form = rank == odd_one ? "V" : "U";
      factors.parts.push_back({tensor.input, tensor.count * sizeof(float), Columns(kFactors) * sizeof(float)});
      factors.on_device = place(tensor);
      auto done = [&refused, start_dense](const std::string& error, const GatheredFactors& gathered) {
        refused += error.empty() && !gathered.is_complete;
        start_dense();
      };
      job.job.protocol(rank).StartFactors(factors, done, Clock::now());
      for (int turn = seed % 50; turn > 0; --turn) job.Turn();
    }
    for (int turn = 0; dense < job.gpus.size(); ++turn) {
      EXPECT(turn < 1000000, Text("seed ", seed, ": ranks and their GPUs wait for each other"));
      job.Turn();
    }
    EXPECT_EQ(refused, job.gpus.size() - has_none, Text("refusals with seed ", seed));
    job.Step(1, seed % 7);
  }
}

// Two ranks of a node whose windows are open, and the second step of their factors.
struct SecondStep {
  explicit SecondStep(double timeout_s, size_t staging_bytes) : job(2, {0, 0}, WithTimeout(timeout_s, staging_bytes)) {
    for (int rank : {0, 1}) {
      gpus.push_back(std::make_unique<GpuRank>(rank, 2, 1U << kFactors));
      gpus[rank]->device.can_export = true;
      Submit(rank, 0);
    }
    for (int turn = 0; turn < 3000; ++turn) {
      for (int rank : {0, 1}) Turn(rank);
    }
    EXPECT_EQ(gpus[0]->pending + gpus[1]->pending, 0, "exchanges of the first step");
  }

  static Options WithTimeout(double timeout_s, size_t staging_bytes) {
    Options options = SmallOptions({{}, 2, {}});
    options.timeout_s = timeout_s;
    options.staging_bytes = static_cast<int64_t>(staging_bytes);
    return options;
  }

  void Submit(int rank, int step) {
    gpus[rank]->Submit(
        kFactors, step, [](const Exchange&, const Done&) {},
        [&](const Factors& factors, const FactorsDone& done) {
          job.protocol(rank).StartFactors(factors, done, Clock::now());
        });
  }

  void Poll(int rank) {
    job.protocol(rank).Poll();
    job.protocol(rank).Flush();
  }

  void Turn(int rank) {
    while (gpus[rank]->device.Advance(&job.random())) continue;
    Poll(rank);
  }

  static constexpr size_t kFactors = 11;  // more than a piece
  std::vector<std::unique_ptr<GpuRank>> gpus;
  Job job;
};

TEST(ARankSaysGoodbyeWhenOthersHaveTakenWhatItGives) {
  for (int turns : {0, 1, 2, 3, 5, 8}) {
    SecondStep ranks(/*timeout_s=*/60, /*staging_bytes=*/1);
    ranks.Submit(0, 1);
    for (int turn = 0; turn < turns; ++turn) ranks.Turn(0);
    ranks.job.protocol(0).SayGoodbye();  // with more to give than its window holds
    ranks.Submit(1, 1);
    for (int turn = 0; ranks.gpus[0]->pending + ranks.gpus[1]->pending > 0; ++turn) {
      EXPECT(turn < 100000, Text("with a goodbye after ", turns, " turns, ranks wait for each other"));
      for (int rank : {0, 1}) ranks.Turn(rank);
    }
    EXPECT_EQ(ranks.gpus[0]->failed + ranks.gpus[1]->failed, 0,
              Text("failures with a goodbye after ", turns, " turns: ", ranks.job.rank(0).failure));
  }
}

TEST(AGpuThatStopsTakingFactorsIsNamed) {
  SecondStep ranks(/*timeout_s=*/0.05, /*staging_bytes=*/0);
  ranks.Submit(0, 1);
  for (int turn = 0; turn < 300; ++turn) ranks.Turn(0);
  ranks.Submit(1, 1);
  for (int turn = 0; turn < 300; ++turn) {
    ranks.Turn(1);
    ranks.Poll(0);  // whose GPU does nothing more
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(80));
  ranks.job.protocol(0).CheckDeadlines();
  EXPECT_HOLDS(ranks.job.rank(0).failure,
               "Rank 0 waited 0.05 s for its GPU to copy what belongs to exchange 'site 11' (gather)");
  for (auto& gpu : ranks.gpus) {
    while (gpu->device.Advance(&ranks.job.random())) continue;
  }
}

TEST(SumsHaveTheBitsOfTheHost) {
  for (int seed = 0; seed < 20; ++seed) {
    std::vector<std::map<size_t, std::vector<float>>> received;
    for (bool can_export : {false, true}) {
      GpuJob job(kNodes[seed % std::size(kNodes)], seed, 0x3fff & ~(1U << 5 | 1U << 11));  // without factors
      for (const auto& gpu : job.gpus) {
        gpu->device.can_export = can_export;
        gpu->is_rough = true;
      }
      for (int step = 0; step < 2; ++step) job.Step(step, 3);
      received.push_back(job.gpus[0]->received);
    }
    EXPECT(received[0] == received[1], Text("other bits with seed ", seed));
  }
}

TEST(FailuresEndWhatIsOnItsWayBetweenGpus) {
  for (int seed = 0; seed < Schedules(250); ++seed) {
    GpuJob job(kNodes[seed % std::size(kNodes)], seed, {}, /*on_hosts=*/true);
    Vary(&job, seed);
    job.Step(0, 3);  // opens the windows
    const auto starts = job.Starts();
    const int rank = static_cast<int>(job.Bits() % job.gpus.size());
    const size_t ends_at = job.Bits() % (starts.size() + 1);
    auto end = [&] {
      if (seed % 2) return job.gpus[rank]->device.FailNow("its memory is broken");
      job.job.protocol(rank).Fail("enough", /*tell_peers=*/true);
    };
    for (size_t i = 0; i < starts.size(); ++i) {
      if (i == ends_at) end();
      job.Submit(starts[i].first, starts[i].second, 1);
      for (int turn = seed % 50; turn > 0; --turn) job.Turn();
    }
    if (ends_at == starts.size()) end();
    for (int turn = 0; !job.IsDone(); ++turn) {
      EXPECT(turn < 1000000, Text("seed ", seed, ": an exchange does not end"));
      job.Turn();
    }
  }
}

TEST(FactorsInAWindowThatLieAreRefused) {
  struct Case {
    const char* says;
    std::function<void(FrameHeader*)> change;
  };
  const char kOther[] = "expected 1 to 65536 bytes, 0, and 0 or 1, of a rank that combines with this one";
  const std::vector<Case> cases = {
      {"expected a place in one that this rank has opened", [](FrameHeader*) {}},  // they are right but for that
      {kOther, [](FrameHeader* h) { h->length = 65600; }},
      {kOther, [](FrameHeader* h) { h->length = 0; }},
      {kOther, [](FrameHeader* h) { h->dtype = 4; }},
      {kOther, [](FrameHeader* h) { h->sent_dtype = 2; }},
      {kOther, [](FrameHeader* h) { h->root = 2; }},
      {"expected whole rows", [](FrameHeader* h) { h->length -= 4; }},
      {"expected those of another one of 4", [](FrameHeader* h) { h->root = 0; }},
  };
  for (const Case& each : cases) {
    auto owned = std::make_unique<ScriptedTransport>(0, 4);
    ScriptedTransport* const transport = owned.get();
    const Options options = SmallOptions({{}, 2, {}});
    Rank rank(std::move(owned), options);
    const std::vector<float> value(10000);
    Factors factors;
    factors.site = "w";
    factors.parts.push_back({value.data(), 40000, 200});
    rank.protocol->StartFactors(factors, [](const std::string&, GatheredFactors) {}, Clock::now());
    rank.protocol->Flush();
    FrameHeader header = transport->sent.at(0).header;
    header.kind = FrameKind::kGpuFactors;
    header.root = 1;
    each.change(&header);
    transport->Arrive(header.root == 2 ? 2 : 1, Packet(header));
    rank.protocol->Poll();
    EXPECT_HOLDS(rank.failure, each.says);
  }
}

// A sum, and one in place, each of one KV pair of more bytes than a packet takes.
constexpr unsigned kChosen = 1 << 6 | 1 << 7;
constexpr uint64_t kBytes = 9000 * sizeof(float);

TEST(NothingOfANodeTouchesTheHost) {
  const int size = 3;
  GpuJob job({{0, 0, 0}, size, {1}}, 0, kChosen | 1 << 11);  // and factors, in pieces
  for (const auto& gpu : job.gpus) gpu->device.can_export = true;
  job.Step(0, 3);
  std::vector<Bytes> before;
  for (int rank = 0; rank < size; ++rank) before.push_back(BytesOf(&job, rank, "site 6"));
  for (int step = 1; step < 5; ++step) job.Step(step, 3);
  for (int rank = 0; rank < size; ++rank) {
    const Bytes now = BytesOf(&job, rank, "site 6");
    EXPECT_EQ(now.down - before[rank].down, 0U, "bytes to the host");
    EXPECT_EQ(now.up - before[rank].up, 0U, "bytes from the host");
    const uint64_t taken = rank == 1 ? size - 1 : 1;  // the parts of others, or the sum
    uint64_t factors = 0;
    for (int other = 0; other < size; ++other) {
      if (other != rank) factors += sizeof(float) * job.gpus[other]->tensors.at(11).count;
    }
    EXPECT_EQ(now.across - before[rank].across, 4 * (2 * kBytes * taken + factors), "bytes from other GPUs");
  }
}

TEST(ASumLeavesANodeOnceAndComesBackOnce) {
  for (int ranks_per_node : {2, 4}) {
    std::vector<int> nodes(ranks_per_node, 0);
    nodes.resize(2 * ranks_per_node, 1);
    GpuJob job({nodes, ranks_per_node, {1}}, 0, kChosen);
    for (const auto& gpu : job.gpus) gpu->device.can_export = true;
    job.Step(0, 3);
    std::vector<Bytes> before(2), now(2);
    auto add = [&](std::vector<Bytes>* sums) {
      for (size_t rank = 0; rank < nodes.size(); ++rank) {
        Bytes& sum = (*sums)[nodes[rank]];
        for (const std::string site : {"site 6", "site 7"}) {
          sum.network += BytesOf(&job, static_cast<int>(rank), site).network;
        }
        const Bytes bytes = BytesOf(&job, static_cast<int>(rank), "site 6");
        sum.down += bytes.down;
        sum.up += bytes.up;
        sum.across += bytes.across;
      }
    };
    add(&before);
    for (int step = 1; step < 5; ++step) job.Step(step, 3);
    add(&now);
    for (int node = 0; node < 2; ++node) {
      EXPECT_EQ(now[node].down - before[node].down, 4 * 2 * kBytes, "bytes to the host");
      EXPECT_EQ(now[node].up - before[node].up, 4 * 2 * kBytes, "bytes from the host");
      EXPECT_EQ(now[node].network - before[node].network, 4 * 2 * kBytes, "bytes to the other node");
      EXPECT_EQ(now[node].across - before[node].across, 4 * 2 * kBytes * 2 * (ranks_per_node - 1),
                "bytes between GPUs");
    }
  }
}

TEST(WindowsThatOneRankAloneHasServeNobody) {
  GpuJob job({{0, 0, 0}, 3, {1}}, 0, kChosen);
  job.gpus[1]->device.can_export = true;
  for (int step = 0; step < 3; ++step) job.Step(step, 3);
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(BytesOf(&job, rank, "site 6").across, 0U, "bytes between GPUs");
}
