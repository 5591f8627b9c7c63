// PoseidonSync, PoseidonAllReduce, PoseidonBroadcast and PoseidonAllGather on any device: exchange_kernels.cc has those
// of the CPU, exchange_gpu.cc those of GPUs; shard_kernels.h has those of shards. They hand the tensor to this
// process's communicator and return their thread; the communicator's progress thread completes the op. In graphs that
// the passes have rewritten, PoseidonSend and PoseidonRecv (send_recv_kernels.cc) are in the place of PoseidonSync.

#ifndef POSEIDON_EXCHANGE_KERNELS_H_
#define POSEIDON_EXCHANGE_KERNELS_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gathered_rows.h"
#include "process_communicator.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace poseidon {

// Why work that a GPU was given has failed, if any has.
inline absl::Status FailureOf(const Device& device) {
  const std::string failure = device.failure();
  return failure.empty() ? absl::OkStatus() : absl::InternalError(absl::StrCat("On the GPU, ", failure, "."));
}

class ExchangeKernel : public tensorflow::AsyncOpKernel {
 public:
  explicit ExchangeKernel(tensorflow::OpKernelConstruction* context);

 protected:
  // Where the tensors are that are now computed, or will be by what has been put into the device's stream; null for the
  // host's memory.
  virtual std::shared_ptr<OnDevice> Place(tensorflow::OpKernelContext*) const { return nullptr; }

  // Calls `then` when ops that follow may read what has come to the device.
  virtual void Await(tensorflow::OpKernelContext*, const OnDevice&, std::function<void()> then) const { then(); }

  // Exchanges `input` as `exchange` says, of which this fills in what all exchanges have, into `output`, which may be
  // the same. Calls `then` when ops that follow may read it, or `done` after a failure.
  void Run(tensorflow::OpKernelContext* context, Exchange exchange, const tensorflow::Tensor& input,
           const tensorflow::Tensor& output, std::function<void()> then, DoneCallback done) const;

  // The same from input 0 into output 0.
  void RunInPlace(tensorflow::OpKernelContext* context, Exchange exchange, DoneCallback done) const;

  std::string site_;
  Group group_;       // none of ops that have no such attribute
  int priority_ = 0;  // likewise
};

class SumKernel : public ExchangeKernel {
 public:
  using ExchangeKernel::ExchangeKernel;
  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override;

 protected:
  Exchange ToExchange(tensorflow::OpKernelContext* context, const tensorflow::Tensor& value) const;

  Shown shown_ = {"calls"};
};

// A sum of gradients, which may travel in a narrower type.
class SyncKernel : public SumKernel {
 public:
  explicit SyncKernel(tensorflow::OpKernelConstruction* context, const char* row = "ps");
  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override;

 protected:
  // Sets `wire` to what travels for input 0: the same, or narrower.
  absl::Status Narrow(tensorflow::OpKernelContext* context, tensorflow::Tensor* wire) const;

  // Returns what makes output 0 of what has travelled, and then calls `done`.
  std::function<void()> Widening(tensorflow::OpKernelContext* context, const tensorflow::Tensor& wire,
                                 DoneCallback done) const;

  bool is_narrowed_ = false;
};

class BroadcastKernel : public ExchangeKernel {
 public:
  explicit BroadcastKernel(tensorflow::OpKernelConstruction* context);
  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override;

 private:
  int root_ = 0;
  const Shown shown_;
};

class GatherKernel : public ExchangeKernel {
 public:
  explicit GatherKernel(tensorflow::OpKernelConstruction* context);
  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override;

 protected:
  struct Given {
    tensorflow::Tensor value;
    std::shared_ptr<OnDevice> place;
    std::vector<char> stand_ins;  // a byte for each row, if rows have none
    GatheredPart part;            // what all ranks have given, this one's value included
  };

  // Copies the rows of all ranks to `output`, for ops that follow.
  virtual void Concatenate(tensorflow::OpKernelContext* context, const std::shared_ptr<Given>& given,
                           char* output) const;

 private:
  static size_t RowBytes(const tensorflow::Tensor& value);

  const Shown shown_;
};

}  // namespace poseidon

#endif  // POSEIDON_EXCHANGE_KERNELS_H_
