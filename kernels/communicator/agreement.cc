// Lets ranks compare what they train: rank 0 broadcasts its agreement text, and each rank looks for the first line
// in which its own differs.
//
// Tests: tests/training/test_rewritten.py.

#include "agreement.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include "text.h"
#include "turns.h"

namespace poseidon {
namespace {

constexpr char kSite[] = "agreement";
constexpr int kRoot = 0;

// Returns whether this process has not compared these sites yet, and notes that it does now.
bool IsNew(const Communicator* communicator, const std::string& sites) {
  static std::mutex mutex;
  static auto* compared = new std::set<std::pair<const Communicator*, std::string>>;
  std::lock_guard<std::mutex> lock(mutex);
  return compared->emplace(communicator, sites).second;
}

// Calls `then` with rank 0's text. `text` is this rank's.
void BroadcastText(Communicator* communicator, const std::string& text,
                   std::function<void(const std::string& error, const std::string& text)> then) {
  auto length = std::make_shared<int64_t>(text.size());
  Exchange exchange;
  exchange.site = std::string(kSite) + "/length";
  exchange.dtype = DataType::kBytes;
  exchange.count = sizeof(*length);
  exchange.input = exchange.output = length.get();
  exchange.root = kRoot;
  communicator->Submit(exchange, [communicator, text, length, then](const std::string& error) {
    if (!error.empty()) return then(error, "");
    auto buffer = std::make_shared<std::string>(text);
    buffer->resize(*length);
    Exchange exchange;
    exchange.site = std::string(kSite) + "/text";
    exchange.dtype = DataType::kBytes;
    exchange.count = *length;
    exchange.input = exchange.output = buffer->data();
    exchange.root = kRoot;
    communicator->Submit(exchange, [buffer, then](const std::string& error) {
      // The network may still write to it after a failure.
      if (!error.empty()) new std::shared_ptr<std::string>(buffer);
      then(error, *buffer);
    });
  });
}

std::string TakesNoTurns(int rank, int other) {
  return Text("The training graph of rank ", rank,
              " was not rewritten, so it takes no turns with other jobs, but rank ", other,
              " does; enable Grappler (tf.config.optimizer) on all ranks, or omit crossover.");
}

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace

std::string FirstDifference(const std::string& mine, int rank, const std::string& theirs, int their_rank) {
  const std::vector<std::string> here = Lines(mine), there = Lines(theirs);
  for (size_t i = 0; i < std::max(here.size(), there.size()); ++i) {
    const std::string a = i < here.size() ? here[i] : "nothing";
    const std::string b = i < there.size() ? there[i] : "nothing";
    if (a == b) continue;
    std::ostringstream text;
    text << "the first difference is " << a << " on rank " << rank << ", and " << b << " on rank " << their_rank;
    return text.str();
  }
  return "";
}

void Agree(Communicator* communicator, const AgreementText& mine, bool strict,
           std::function<void(const Agreement&)> done) {
  if (!IsNew(communicator, mine.sites)) return done({});
  constexpr char kSeparator = '\0';
  BroadcastText(communicator, mine.sites + kSeparator + mine.plan,
                [communicator, mine, strict, done](const std::string& error, const std::string& text) {
                  if (!error.empty()) return done({error, ""});
                  const size_t separator = text.find(kSeparator);
                  const AgreementText theirs{text.substr(0, separator), text.substr(separator + 1)};
                  const int rank = communicator->rank();
                  Agreement agreement;
                  std::string difference = FirstDifference(mine.sites, rank, theirs.sites, kRoot);
                  if (!difference.empty()) {
                    agreement.error = "Ranks train different variables: " + difference +
                                      ". Build and freeze the same layers on all ranks.";
                  } else if (ProcessTurns() && mine.plan.empty() != theirs.plan.empty()) {
                    // Who takes turns waits until all others want theirs.
                    const int without = mine.plan.empty() ? rank : kRoot;
                    agreement.error = TakesNoTurns(without, rank + kRoot - without);
                  } else if (!mine.plan.empty() && !theirs.plan.empty()) {
                    difference = FirstDifference(mine.plan, rank, theirs.plan, kRoot);
                    if (!difference.empty() && strict) {
                      agreement.error = "strict=True, but ranks have different plans: " + difference +
                                        ". Give all ranks data of the same shapes, or use strict=False.";
                    } else if (!difference.empty()) {
                      agreement.warning = "Ranks have different plans, so some gradients travel dense: " + difference +
                                          ". Give all ranks data of the same shapes.";
                    }
                  }
                  if (!agreement.error.empty()) communicator->Abort(agreement.error, /*seconds=*/0);
                  done(agreement);
                });
}

}  // namespace poseidon
