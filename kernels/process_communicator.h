// How kernels find the communicator of their process.

#ifndef POSEIDON_PROCESS_COMMUNICATOR_H_
#define POSEIDON_PROCESS_COMMUNICATOR_H_

#include <string>

#include "c_api.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace poseidon {

// The attribute of a node that names the rank it runs as, in a process that holds several ranks of a job.
constexpr char kRankAttribute[] = "_poseidon_rank";

// Returns the communicator of this process, or of the rank that the node names; fails the op and returns null if
// there is none.
inline Communicator* CommunicatorOf(tensorflow::OpKernelContext* context, const tensorflow::OpKernel& op,
                                    const std::string& site) {
  int64_t rank;
  if (tensorflow::TryGetNodeAttr(op.def(), kRankAttribute, &rank)) {
    Communicator* communicator = ProcessRank(rank);
    if (!communicator) {
      context->SetStatus(
          absl::FailedPreconditionError(absl::StrCat(op.type_string(), " '", site, "' runs as rank ", rank,
                                                     ", which this process does not hold; call "
                                                     "tf_poseidon.job.communicator.use_ranks_for_ops() first.")));
    }
    return communicator;
  }
  Communicator* communicator = ProcessCommunicator();
  if (!communicator) {
    context->SetStatus(absl::FailedPreconditionError(
        absl::StrCat(op.type_string(), " '", site,
                     "' runs outside a job; create a "
                     "tf_poseidon.PoseidonStrategy, or call tf_poseidon.load_ops(), in this process first.")));
  }
  return communicator;
}

// The attribute of a node that exchanges something in a graph that was partitioned by rows: what the step does
// meanwhile. "computes" and "waits" are of what it exchanges once; "repeats" of what it does in each round of a loop.
constexpr char kActivityAttribute[] = "_poseidon_meanwhile";

// How timelines show an exchange.
struct Shown {
  const char* row;  // same as in Event
  bool is_blocking = false;
};

// Returns how an exchange is shown, in `row` if a step has it once; without the attribute as `otherwise` says.
inline Shown ShownAs(tensorflow::OpKernelConstruction* context, const char* row, Shown otherwise) {
  std::string activity;
  if (!tensorflow::TryGetNodeAttr(context->def(), kActivityAttribute, &activity)) return otherwise;
  if (activity == "repeats") return {"calls"};
  return {row, activity == "waits"};
}

// Notes how long it takes to make a gradient of what other ranks have sent, from here to the block's end.
class RebuildEvent {
 public:
  explicit RebuildEvent(const std::string& site) : site_(site) {
    Communicator* communicator = ProcessCommunicator();
    if (!communicator || !communicator->events().is_recording()) return;
    events_ = &communicator->events();
    begin_ = Clock::now();
  }
  ~RebuildEvent() {
    if (events_) events_->Add(site_, {"rebuild", begin_, Clock::now(), 0, false});
  }

  RebuildEvent(const RebuildEvent&) = delete;
  RebuildEvent& operator=(const RebuildEvent&) = delete;

 private:
  const std::string& site_;
  EventLog* events_ = nullptr;
  Clock::time_point begin_;
};

}  // namespace poseidon

#endif  // POSEIDON_PROCESS_COMMUNICATOR_H_
