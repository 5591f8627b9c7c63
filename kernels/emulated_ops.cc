// Ops that take as long as an accelerator would, and compute nothing: for benchmarks on emulated clusters.
//
// Tests: tests/scripts/test_benchmark.py.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <queue>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "process_communicator.h"
#include "provenance.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace poseidon {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status KernelShapes(InferenceContext* c) {
  std::vector<tensorflow::PartialTensorShape> shapes;
  TF_RETURN_IF_ERROR(c->GetAttr("shapes", &shapes));
  for (size_t i = 0; i < shapes.size(); ++i) {
    ShapeHandle shape;
    TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(shapes[i], &shape));
    c->set_output(i, shape);
  }
  return absl::OkStatus();
}

absl::Status ProductShape(InferenceContext* c) {
  ShapeHandle u, v;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &u));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &v));
  DimensionHandle rows;
  TF_RETURN_IF_ERROR(c->Merge(c->Dim(u, 0), c->Dim(v, 0), &rows));
  c->set_output(0, c->Matrix(c->Dim(u, 1), c->Dim(v, 1)));
  return absl::OkStatus();
}

REGISTER_OP("PoseidonEmulatedKernel")
    .Input("after: after_types")
    .Output("outputs: T")
    .Attr("after_types: list(type) >= 0")
    .Attr("T: list({float, bfloat16})")
    .Attr("shapes: list(shape)")
    .Attr("densities: list(float) = []")
    .Attr("seconds: float")
    .SetIsStateful()
    .SetShapeFn(KernelShapes)
    .Doc(R"doc(
Stands for the work of an accelerator, which runs one piece of work at a time and uses no processor.

after: The inputs of the work.
outputs: Tensors of the given shapes. Their values are 1, and all dense ones of a type share one memory.
densities: The share of each output that is not zero, 1 by default; columns 0, 1024, 2048 and so on never are.
seconds: How long it takes.
)doc");

REGISTER_OP("PoseidonEmulatedProduct")
    .Input("u: float")
    .Input("v: float")
    .Output("product: float")
    .Attr("operations_per_second: float")
    .SetIsStateful()
    .SetShapeFn(ProductShape)
    .Doc(R"doc(
Stands for the matrix product U^T V on an accelerator.

u: [K, M], the first value of each row is 1, which is checked.
v: [K, N], likewise.
product: [M, N], of values 1.
operations_per_second: How fast it is; a product has 2 K M N.
)doc");

// The accelerator of this process: a queue of work, and the time at which it will be done with it.
//
// Processes that have the same name in TF_POSEIDON_ACCELERATOR share one, which does their work in the order in which
// they ask for it, like a device that several processes use.
class Accelerator {
 public:
  static Accelerator& Instance() {
    static auto* instance = new Accelerator;  // never destroyed: its thread waits until the process ends
    return *instance;
  }

  // The time at which work begins, and at which it ends.
  struct Span {
    Clock::time_point begin, end;
  };
  using Done = std::function<void(const Span&)>;

  // Returns why it cannot be used.
  const absl::Status& status() const { return status_; }

  // Calls `done` when work that takes as long, and all that came before it, would be over.
  void Enqueue(double seconds, Done done) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.emplace(Reserve(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds))),
                   std::move(done));
    has_work_.notify_one();
  }

 private:
  // In ticks of the clock, which is the same for all processes. What waits in the queue follows on at once, however
  // late a thread wakes up. What needs the result of what came before is enqueued as late as that, as a real
  // accelerator's host would be.
  using FreeAt = std::atomic<Clock::rep>;
  static_assert(FreeAt::is_always_lock_free, "several processes use it");

  Accelerator() {
    if (const char* name = std::getenv("TF_POSEIDON_ACCELERATOR")) Share(name);
    std::thread([this] { Work(); }).detach();
  }

  void Share(std::string name) {
    std::replace(name.begin(), name.end(), '/', '_');
    const std::string path = absl::StrCat("/dev/shm/poseidon-accelerator-", geteuid(), "-", name);
    const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    void* memory = MAP_FAILED;
    if (file >= 0 && ftruncate(file, sizeof(FreeAt)) == 0) {  // zeros, if it is new
      memory = mmap(nullptr, sizeof(FreeAt), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    if (memory == MAP_FAILED) {
      status_ = absl::UnavailableError(absl::StrCat(
          "TF_POSEIDON_ACCELERATOR=", name, ", but processes cannot share this emulated accelerator by the file '",
          path, "' (", std::strerror(errno),
          "), expected one that this user may write: delete it, or unset the variable."));
    } else {
      free_at_ = static_cast<FreeAt*>(memory);
    }
    if (file >= 0) close(file);
  }

  Span Reserve(Clock::duration duration) {
    Clock::rep free_at = free_at_->load(), begin;
    do {
      begin = std::max(free_at, Clock::now().time_since_epoch().count());
    } while (!free_at_->compare_exchange_weak(free_at, begin + duration.count()));
    const Clock::time_point time{Clock::duration(begin)};
    return {time, time + duration};
  }

  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      // Not wait(): what g++ 12 makes of it needs a libstdc++ that distributions of 2021 and 2022 do not have.
      while (!has_work_.wait_for(lock, std::chrono::hours(1), [this] { return !queue_.empty(); })) {
      }
      auto [span, done] = std::move(queue_.front());
      queue_.pop();
      lock.unlock();
      std::this_thread::sleep_until(span.end);
      done(span);
      done = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable has_work_;
  std::queue<std::pair<Span, Done>> queue_;
  FreeAt own_free_at_{0};
  FreeAt* free_at_ = &own_free_at_;
  absl::Status status_;
};

// Memory for all outputs of a type: models are larger than the memory of the machine that emulates their cluster.
template <typename T>
class Ones {
 public:
  static Ones& Instance() {
    static auto* instance = new Ones;
    return *instance;
  }

  // Returns a tensor of ones that shares its memory with the others.
  absl::Status Make(OpKernelContext* context, const TensorShape& shape, Tensor* tensor) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (shape.num_elements() > ones_.NumElements()) {
      TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DataTypeToEnum<T>::value, {shape.num_elements()}, &ones_));
      ones_.template flat<T>().setConstant(T(1));
    }
    if (!tensor->CopyFrom(ones_.Slice(0, shape.num_elements()), shape)) {
      return absl::InternalError("A slice of the ones has another size than its shape.");
    }
    return absl::OkStatus();
  }

 private:
  std::mutex mutex_;
  Tensor ones_{tensorflow::DataTypeToEnum<T>::value, TensorShape({0})};
};

absl::Status MakeOnes(OpKernelContext* context, tensorflow::DataType type, const TensorShape& shape, Tensor* tensor) {
  if (type == tensorflow::DT_FLOAT) return Ones<float>::Instance().Make(context, shape, tensor);
  return Ones<tensorflow::bfloat16>::Instance().Make(context, shape, tensor);
}

// Fills a matrix with zeros and ones that look random. Ones are in the columns that checks look at, see kChecked.
void FillSparse(float density, Tensor* tensor) {
  constexpr int64_t kChecked = 1024;
  auto matrix = tensor->flat_inner_dims<float>();
  std::mt19937 random(1);
  for (int64_t row = 0; row < matrix.dimension(0); ++row) {
    for (int64_t column = 0; column < matrix.dimension(1); ++column) {
      matrix(row, column) = column % kChecked == 0 || random() < density * std::mt19937::max();
    }
  }
}

class KernelKernel : public AsyncOpKernel {
 public:
  explicit KernelKernel(OpKernelConstruction* context) : AsyncOpKernel(context) {
    std::vector<float> densities;
    OP_REQUIRES_OK(context, Accelerator::Instance().status());
    OP_REQUIRES_OK(context, context->GetAttr("seconds", &seconds_));
    OP_REQUIRES_OK(context, context->GetAttr("shapes", &shapes_));
    OP_REQUIRES_OK(context, context->GetAttr("densities", &densities));
    sparse_.resize(shapes_.size());
    for (size_t i = 0; i < std::min(densities.size(), shapes_.size()); ++i) {
      if (densities[i] >= 1) continue;
      OP_REQUIRES_OK(context, context->allocate_temp(tensorflow::DT_FLOAT, shapes_[i], &sparse_[i].emplace()));
      FillSparse(densities[i], &*sparse_[i]);
    }
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    for (size_t i = 0; i < shapes_.size(); ++i) {
      Tensor output;
      if (sparse_[i]) {
        output = *sparse_[i];
      } else {
        OP_REQUIRES_OK_ASYNC(context, MakeOnes(context, output_type(i), shapes_[i], &output), done);
      }
      context->set_output(i, output);
    }
    Accelerator::Instance().Enqueue(seconds_, [done = std::move(done)](const auto&) { done(); });
  }

 private:
  float seconds_;
  std::vector<TensorShape> shapes_;
  std::vector<std::optional<Tensor>> sparse_;  // by output: it, if it is not dense
};

class ProductKernel : public AsyncOpKernel {
 public:
  explicit ProductKernel(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, Accelerator::Instance().status());
    OP_REQUIRES_OK(context, context->GetAttr("operations_per_second", &operations_per_second_));
    site_ = SiteOf(context);  // only what is made of gathered factors has one
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const double k = context->input(0).dim_size(0);
    const int64_t m = context->input(0).dim_size(1), n = context->input(1).dim_size(1);
    for (int i : {0, 1}) OP_REQUIRES_OK_ASYNC(context, CheckRows(context->input(i).matrix<float>()), done);
    Tensor output;
    OP_REQUIRES_OK_ASYNC(context, MakeOnes(context, tensorflow::DT_FLOAT, TensorShape({m, n}), &output), done);
    context->set_output(0, output);
    // The event first: after `done` this kernel, or the recording, may be gone.
    Accelerator::Instance().Enqueue(2 * k * m * n / operations_per_second_,
                                    [this, done = std::move(done)](const auto& span) {
                                      Communicator* communicator = ProcessCommunicator();
                                      if (communicator && !site_.empty()) {
                                        communicator->events().Add(site_, {"rebuild", span.begin, span.end, 0, false});
                                      }
                                      done();
                                    });
  }

 private:
  // Factors that were lost on the way show here: their product would have been wrong.
  static absl::Status CheckRows(tensorflow::TTypes<float>::ConstMatrix factor) {
    for (int64_t row = 0; factor.size() > 0 && row < factor.dimension(0); ++row) {
      if (factor(row, 0) != 1) {
        return absl::InternalError(absl::StrCat("An emulated factor begins its row ", row, " with ", factor(row, 0),
                                                ", expected 1: another rank's row has not come here as it was sent."));
      }
    }
    return absl::OkStatus();
  }

  float operations_per_second_;
  std::string site_;
};

REGISTER_KERNEL_BUILDER(Name("PoseidonEmulatedKernel").Device(tensorflow::DEVICE_CPU), KernelKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonEmulatedProduct").Device(tensorflow::DEVICE_CPU), ProductKernel);

}  // namespace
}  // namespace poseidon
