// The ops at the beginning and the end of a turn on an accelerator that several jobs share, and how Python has this
// process take turns.
//
// Tests: tests/graphs/test_turns.py, tests/training/test_crossover.py.

#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "c_api.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "turn_kernels.h"
#include "turns.h"
#include "warnings.h"

namespace poseidon {
namespace {

using tensorflow::AsyncOpKernel;

REGISTER_OP("PoseidonTurnBegin")
    .Attr("turn: int >= 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Waits until this process has its turn on its accelerator. Without other jobs there, it returns at once.

turn: The number of the turn in the function; several ops may begin the same.
)doc");

REGISTER_OP("PoseidonTurnEnd")
    .Attr("turn: int >= 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Gives a turn back, on a GPU when all that was put into its stream before is done.

turn: As of PoseidonTurnBegin.
)doc");

class TurnBeginKernel : public AsyncOpKernel {
 public:
  explicit TurnBeginKernel(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("turn", &turn_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const std::shared_ptr<Turns> turns = ProcessTurns();
    if (!turns) return done();
    turns->Begin(context->step_id(), turn_, [context, done = std::move(done)](const std::string& error) {
      if (!error.empty()) context->SetStatus(absl::AbortedError(error));
      done();
    });
  }

 private:
  int64_t turn_;
};

class CpuTurnEndKernel : public TurnEndKernel {
 public:
  using TurnEndKernel::TurnEndKernel;

 protected:
  std::function<bool()> Completion(OpKernelContext*) const override { return nullptr; }
};

REGISTER_KERNEL_BUILDER(Name("PoseidonTurnBegin").Device(tensorflow::DEVICE_CPU), TurnBeginKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonTurnEnd").Device(tensorflow::DEVICE_CPU), CpuTurnEndKernel);

size_t Written(const std::string& written, char* text, size_t capacity) {
  if (written.size() < capacity) std::memcpy(text, written.c_str(), written.size() + 1);
  return written.size() + 1;
}

}  // namespace
}  // namespace poseidon

// The library hides all other symbols.
#pragma GCC visibility push(default)
extern "C" {

// Lets this process take turns, see poseidon::Turns and poseidon::TurnTable; `path` is the table's. They end when the
// communicator is left.
bool poseidon_take_turns(poseidon::Communicator* communicator, const char* path, const char* name,
                         const char* accelerator, uint64_t job, uint64_t accelerators, const char* program,
                         int32_t coordinator, double deadline_s, char* error) {
  try {
    const poseidon::TurnTaker taker = {job, communicator->rank(), accelerators, program};
    auto table = std::make_unique<poseidon::TurnTable>(path, name, accelerator, taker);
    poseidon::SetProcessTurns(
        std::make_shared<poseidon::Turns>(communicator, std::move(table), coordinator, deadline_s, poseidon::Warn));
    return true;
  } catch (const std::exception& e) {
    std::strncpy(error, e.what(), kPoseidonTextBytes - 1);
    return false;
  }
}

// Has this process take turns no more.
void poseidon_leave_turns() { poseidon::SetProcessTurns(nullptr); }

// Ends the turn that this process has, if it has one.
void poseidon_end_turns() {
  if (const auto turns = poseidon::ProcessTurns()) turns->EndAll();
}

// Turns::Json, and TurnTable::Describe: both write a text when it fits, and return the bytes that it needs.
size_t poseidon_turns(char* text, size_t capacity) {
  const auto turns = poseidon::ProcessTurns();
  return poseidon::Written(turns ? turns->Json() : "{}", text, capacity);
}

size_t poseidon_describe_turns(const char* path, char* text, size_t capacity) {
  return poseidon::Written(poseidon::TurnTable::Describe(path), text, capacity);
}

}  // extern "C"
#pragma GCC visibility pop
