// Digests of tensors, and the ops that notice by them when a rank is given other inputs than rank 0.
//
// Tests: tests/communicator/test_row_ops.py, tests/unit/test_data.py.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/substitute.h"
#include "process_communicator.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "xxh64.h"

namespace poseidon {
namespace {

constexpr int kParts = 4;  // of a fingerprint
using Fingerprint = std::array<int64_t, kParts>;

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::tstring;

REGISTER_OP("PoseidonCompare")
    .Input("values: T")
    .Attr("T: list(type) >= 1")
    .Attr("names: list(string)")
    .Attr("site: string")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Ends the job unless all ranks give a step the same inputs.

Compares types, shapes and bits, in calls 1, 2, 4, 8, ... of this node; the other calls do nothing. Every rank
runs the op equally often. What travels is a digest of each value, 8 bytes.

values: This rank's inputs: numbers, bools or strings.
names: For each value, its name for messages.
site: A name that is the same on all ranks, and the same for no two nodes.
)doc");

REGISTER_OP("PoseidonDigests")
    .Input("values: T")
    .Output("digests: int64")
    .Attr("T: list(type) >= 0")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      context->set_output(0, context->Vector(context->num_inputs()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Returns a digest of each value, which depends on its type, its shape and all of its bits.

values: Numbers, bools or strings, of any number of bytes.
digests: [number of values].
)doc");

REGISTER_OP("PoseidonFingerprint")
    .Input("rows: int64")
    .Input("values: T")
    .Output("fingerprint: int64")
    .Attr("T: list(type) >= 0")
    .Attr("structure: int")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      context->set_output(0, context->Vector(kParts));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Returns what is compared of a batch: `structure`, `rows`, a digest of its shapes, and one of its values.

rows: How many rows it has.
values: The parts of the batch: numbers, bools or strings.
structure: A digest of how the parts belong together.
fingerprint: [4].
)doc");

REGISTER_OP("PoseidonCompareFirst")
    .Input("index: int64")
    .Input("rows: int64")
    .Input("values: T")
    .Output("same_values: T")
    .Attr("T: list(type) >= 1")
    .Attr("structure: int")
    .Attr("texts: list(string)")
    .Attr("site: string")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      for (int i = 0; i < context->num_outputs(); ++i) context->set_output(i, context->input(i + 2));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Returns a batch; ends the job unless all ranks have the same first one.

index: The number of the batch; those after the first, 0, are not compared.
rows, values, structure: Same as in PoseidonFingerprint.
texts: For each part of the fingerprint, what is said if it is the first that differs, with $0 and $1 in place of the
  part of this rank and that of rank 0.
site: A name that is the same on all ranks, and the same for no two nodes.
)doc");

// Returns a hash of everything that must be the same on all ranks.
uint64_t Digest(const Tensor& value) {
  std::vector<int64_t> form = {value.dtype()};
  for (int i = 0; i < value.dims(); ++i) form.push_back(value.dim_size(i));
  uint64_t digest = Xxh64(reinterpret_cast<const char*>(form.data()), form.size() * sizeof(int64_t));
  // Each hash is the seed of the next one, and the length of the data is in it: how strings are divided counts.
  if (value.dtype() != tensorflow::DT_STRING) {
    const absl::string_view bytes = value.tensor_data();
    return Xxh64(bytes.data(), bytes.size(), digest);
  }
  const auto texts = value.flat<tstring>();
  for (int64_t i = 0; i < texts.size(); ++i) {
    digest = Xxh64(texts(i).data(), texts(i).size(), digest);
  }
  return digest;
}

uint64_t Digest(const std::vector<int64_t>& numbers) {
  return Xxh64(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int64_t));
}

// Returns the fingerprint of a batch; input number `first` is its rows, and those behind it are its parts.
Fingerprint FingerprintOf(OpKernelContext* context, int first, int64_t structure) {
  std::vector<int64_t> sizes, digests;
  for (int i = first + 1; i < context->num_inputs(); ++i) {
    const Tensor& value = context->input(i);
    sizes.push_back(value.dims());
    for (int d = 0; d < value.dims(); ++d) sizes.push_back(value.dim_size(d));
    digests.push_back(static_cast<int64_t>(Digest(value)));
  }
  const int64_t rows = context->input(first).scalar<int64_t>()();
  return {structure, rows, static_cast<int64_t>(Digest(sizes)), static_cast<int64_t>(Digest(digests))};
}

bool HasDigest(tensorflow::DataType type) {
  return tensorflow::DataTypeCanUseMemcpy(type) || type == tensorflow::DT_STRING;
}

// Refuses values that have no digest; they are the inputs from number `first` on.
absl::Status CheckTypes(const OpKernel& kernel, int first) {
  for (int i = first; i < kernel.num_inputs(); ++i) {
    if (HasDigest(kernel.input_type(i))) continue;
    return absl::InvalidArgumentError(absl::StrCat("Value ", i - first, " has type ",
                                                   tensorflow::DataTypeString(kernel.input_type(i)),
                                                   ", expected numbers, bools or strings."));
  }
  return absl::OkStatus();
}

class DigestsKernel : public OpKernel {
 public:
  explicit DigestsKernel(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, CheckTypes(*this, 0));
  }

  void Compute(OpKernelContext* context) override {
    Tensor* digests;
    OP_REQUIRES_OK(context, context->allocate_output(0, {num_inputs()}, &digests));
    for (int i = 0; i < num_inputs(); ++i) {
      digests->flat<int64_t>()(i) = static_cast<int64_t>(Digest(context->input(i)));
    }
  }
};

using Digests = std::vector<int64_t>;

// Ends the job if `difference`, given this rank's digests and those of rank 0, says that they differ.
void CompareWithRank0(OpKernelContext* context, Communicator* communicator, const std::string& site, Digests own,
                      std::function<std::string(const Digests&, const Digests&)> difference,
                      AsyncOpKernel::DoneCallback done) {
  // Kept for ever after a failure, since the network may still use them.
  auto* digests = new std::pair<Digests, Digests>(own, Digests(own.size()));
  Exchange exchange;
  exchange.site = site;
  exchange.dtype = DataType::kBytes;
  exchange.count = own.size() * sizeof(int64_t);
  exchange.input = digests->first.data();
  exchange.output = digests->second.data();
  exchange.root = 0;
  communicator->Submit(std::move(exchange), [context, communicator, digests, difference = std::move(difference),
                                             done = std::move(done)](const std::string& error) {
    if (error.empty()) {
      const std::string text = difference(digests->first, digests->second);
      delete digests;
      if (!text.empty()) {
        communicator->Abort(text, /*seconds=*/0);
        context->SetStatus(absl::AbortedError(text));
      }
    } else {
      context->SetStatus(absl::AbortedError(error));
    }
    done();
  });
}

class CompareKernel : public AsyncOpKernel {
 public:
  explicit CompareKernel(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("names", &names_));
    OP_REQUIRES_OK(context, context->GetAttr("site", &site_));
    OP_REQUIRES(context, static_cast<int>(names_.size()) == num_inputs(),
                absl::InvalidArgumentError(absl::StrCat("'names' has ", names_.size(), " elements, but there are ",
                                                        num_inputs(), " inputs; expected one each.")));
    for (int i = 0; i < num_inputs(); ++i) {
      const tensorflow::DataType type = input_type(i);
      OP_REQUIRES(
          context, HasDigest(type),
          absl::InvalidArgumentError(absl::StrCat("'", names_[i], "' has type ", tensorflow::DataTypeString(type),
                                                  ", expected numbers, bools or "
                                                  "strings, which can be compared between ranks; leave it out.")));
    }
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const int64_t call = ++calls_;
    if ((call & (call - 1)) != 0) return done();  // no power of two
    Communicator* communicator = CommunicatorOf(context, *this, site_);
    if (!communicator || communicator->size() == 1) return done();
    Digests own;
    for (int i = 0; i < num_inputs(); ++i) own.push_back(static_cast<int64_t>(Digest(context->input(i))));
    CompareWithRank0(
        context, communicator, "compare/" + site_, std::move(own),
        [this, communicator, call](const Digests& own, const Digests& first) {
          return Difference(own, first, communicator->rank(), call);
        },
        std::move(done));
  }

 private:
  // Returns which value differs, or an empty text.
  std::string Difference(const Digests& own, const Digests& first, int rank, int64_t call) const {
    for (size_t i = 0; i < names_.size(); ++i) {
      if (own[i] == first[i]) continue;
      return absl::StrCat("Rank ", rank, " gives '", names_[i], "' another value than rank 0, in call ", call,
                          ". All ranks must give "
                          "a step the same global batches in the same order: seed what shuffles or generates the data "
                          "(keras.utils.set_random_seed(...), shuffle(seed=...)).");
    }
    return "";
  }

  std::vector<std::string> names_;
  std::string site_;
  std::atomic<int64_t> calls_{0};
};

class FingerprintKernel : public OpKernel {
 public:
  explicit FingerprintKernel(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, CheckTypes(*this, 1));
    OP_REQUIRES_OK(context, context->GetAttr("structure", &structure_));
  }

  void Compute(OpKernelContext* context) override {
    Tensor* result;
    OP_REQUIRES_OK(context, context->allocate_output(0, {kParts}, &result));
    const Fingerprint fingerprint = FingerprintOf(context, 0, structure_);
    std::copy(fingerprint.begin(), fingerprint.end(), result->flat<int64_t>().data());
  }

 private:
  int64_t structure_;
};

class CompareFirstKernel : public AsyncOpKernel {
 public:
  explicit CompareFirstKernel(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, CheckTypes(*this, 2));
    OP_REQUIRES_OK(context, context->GetAttr("structure", &structure_));
    OP_REQUIRES_OK(context, context->GetAttr("texts", &texts_));
    OP_REQUIRES_OK(context, context->GetAttr("site", &site_));
    OP_REQUIRES(
        context, texts_.size() == kParts,
        absl::InvalidArgumentError(absl::StrCat("'texts' has ", texts_.size(), " elements, expected ", kParts, ".")));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    for (int i = 0; i < context->num_outputs(); ++i) context->set_output(i, context->input(i + 2));
    if (context->input(0).scalar<int64_t>()() != 0) return done();
    Communicator* communicator = CommunicatorOf(context, *this, site_);
    if (!communicator || communicator->size() == 1) return done();
    const Fingerprint own = FingerprintOf(context, 1, structure_);
    CompareWithRank0(
        context, communicator, site_, {own.begin(), own.end()},
        [this, communicator](const Digests& own, const Digests& first) {
          return Difference(own, first, communicator->rank());
        },
        [communicator, begin = Clock::now(), done = std::move(done)] {
          communicator->Compared(begin, Clock::now());
          done();
        });
  }

 private:
  // Returns how a rank's batch differs, or an empty text: the first difference explains the others.
  std::string Difference(const Digests& own, const Digests& first, int rank) const {
    for (int i = 0; i < kParts; ++i) {
      if (own[i] == first[i]) continue;
      return absl::StrCat("Rank ", rank,
                          " has different data than rank 0: ", absl::Substitute(texts_[i], own[i], first[i]));
    }
    return "";
  }

  int64_t structure_;
  std::vector<std::string> texts_;
  std::string site_;
};

REGISTER_KERNEL_BUILDER(Name("PoseidonFingerprint").Device(tensorflow::DEVICE_CPU), FingerprintKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonCompareFirst").Device(tensorflow::DEVICE_CPU), CompareFirstKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonDigests").Device(tensorflow::DEVICE_CPU), DigestsKernel);
REGISTER_KERNEL_BUILDER(Name("PoseidonCompare").Device(tensorflow::DEVICE_CPU), CompareKernel);

}  // namespace
}  // namespace poseidon
