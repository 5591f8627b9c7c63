// PoseidonSend and PoseidonRecv on any device: send_recv_kernels.cc has those of the CPU, send_recv_gpu.cc those of
// GPUs.

#ifndef POSEIDON_SEND_RECV_KERNELS_H_
#define POSEIDON_SEND_RECV_KERNELS_H_

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "columns.h"
#include "process_communicator.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace poseidon {

// Of scheme "hfb": which factor is divided and how, and the exchange that puts together what is made of it.
struct Divided {
  size_t factor;
  std::vector<ColumnRange> ranges;  // by rank
  ColumnRange own;                  // this rank's
  Factors joining;                  // its part is to be filled in
};

// What PoseidonSend has started: holds the tensors until the communicator is done with them.
class Ticket {
 public:
  using Tensors = std::vector<tensorflow::Tensor>;

  // Of schemes "sfb" and "hfb", and of scheme "ps". `on_device` is null if the tensors are in the host's memory.
  Ticket(Tensors factors, std::shared_ptr<OnDevice> on_device, std::optional<Divided> divided)
      : inputs_(std::move(factors)), on_device_(std::move(on_device)), divided_(std::move(divided)) {}
  Ticket(tensorflow::Tensor gradient, tensorflow::Tensor sum, std::shared_ptr<OnDevice> on_device)
      : inputs_{std::move(gradient)}, sum_(std::move(sum)), on_device_(std::move(on_device)) {}

  // Keeps a sum that nobody has received as long as the GPU writes it.
  ~Ticket();

  bool has_factors() const { return !sum_; }
  const Tensors& inputs() const { return inputs_; }              // a divided one holds rank after rank's columns
  const tensorflow::Tensor& sum() const { return *sum_; }        // of scheme "ps"
  const GatheredFactors& gathered() const { return gathered_; }  // of "sfb" and "hfb"
  const std::shared_ptr<OnDevice>& on_device() const { return on_device_; }
  const std::optional<Divided>& divided() const { return divided_; }
  const std::string& error() const { return error_; }

  void Finish(const std::string& error, GatheredFactors gathered);

  // Calls `then` when the ticket is finished: now, on this thread, or later on the progress thread.
  void WhenDone(std::function<void()> then);

  // The sum of scheme "ps" now belongs to others.
  void Received() { was_received_ = true; }

 private:
  const Tensors inputs_;
  const std::optional<tensorflow::Tensor> sum_;
  const std::shared_ptr<OnDevice> on_device_;
  const std::optional<Divided> divided_;
  std::mutex mutex_;  // guards what follows until is_done_
  bool is_done_ = false;
  std::string error_;
  GatheredFactors gathered_;
  bool was_received_ = false;
  std::function<void()> waiting_;
};

// Returns the ticket that is input 0 of an op; fails the op and returns null if it is something else.
std::shared_ptr<Ticket> TicketOf(tensorflow::OpKernelContext* context);

class SendKernel : public tensorflow::OpKernel {
 public:
  explicit SendKernel(tensorflow::OpKernelConstruction* context);
  void Compute(tensorflow::OpKernelContext* context) override;

 protected:
  // Where the tensors are that are now computed, or will be by what has been put into the device's stream; null for the
  // host's memory.
  virtual std::shared_ptr<OnDevice> Place(tensorflow::OpKernelContext* context) const = 0;

  float least_saving_ = 1;

 private:
  struct Site {
    std::string name;
    std::string form;
    bool is_strict = false;
    std::atomic<bool> has_warned{false};
  };

  std::shared_ptr<Ticket> SendGradient(tensorflow::OpKernelContext* context, Communicator* communicator,
                                       bool contributes);
  std::shared_ptr<Ticket> SendFactors(tensorflow::OpKernelContext* context, Communicator* communicator,
                                      bool contributes);
  std::optional<Divided> Divide(tensorflow::OpKernelContext* context, const Communicator& communicator,
                                std::vector<tensorflow::Tensor>* factors) const;
  static std::string NoteRefusal(Site* site, Communicator* communicator, int rank);

  // Exchanges may outlive the kernel.
  const std::shared_ptr<Site> site_ = std::make_shared<Site>();
  bool sends_factors_ = false, divides_ = false, joins_ = true, is_clocked_ = false;
  int divided_ = 0;
  Shown shown_ = {"calls"};
  Group group_;
  int priority_ = 0;
  bool has_float_sum_ = false;
};

class RecvKernel : public tensorflow::AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;
  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override;

 protected:
  // Calls `then` when ops that follow may read the sum; an exchange of it is done.
  virtual void AwaitSum(tensorflow::OpKernelContext* context, const Ticket& ticket, std::function<void()> then) = 0;

  // Copies the rows of all ranks of one factor to `output`, for ops that follow.
  virtual void CopyFactor(tensorflow::OpKernelContext* context, const std::shared_ptr<Ticket>& ticket, size_t factor,
                          char* output) = 0;

 private:
  void CopyFactors(tensorflow::OpKernelContext* context, const std::shared_ptr<Ticket>& ticket);
};

}  // namespace poseidon

#endif  // POSEIDON_SEND_RECV_KERNELS_H_
