// A dataset that measures how long steps wait for their batches, whichever way they ask for them.
//
// Tests: tests/unit/test_data.py, tests/training/test_waiting_for_data.py.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "c_api.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/full_type_util.h"
#include "tensorflow/core/framework/op.h"

namespace poseidon {
namespace {

namespace data = tensorflow::data;
namespace full_type = tensorflow::full_type;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

REGISTER_OP("PoseidonTimedDataset")
    .Input("input_dataset: variant")
    .Output("handle: variant")
    .Attr("output_types: list(type) >= 1")
    .Attr("output_shapes: list(shape) >= 1")
    .SetTypeConstructor(full_type::VariadicTensorContainer(tensorflow::TFT_DATASET, "output_types"))
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Returns a dataset with the elements of another one. How long its reader has waited for each of them, the communicator of
the process counts, and records.

output_types, output_shapes: Same as of the other dataset.
)doc");

class TimedDataset : public data::DatasetBase {
 public:
  TimedDataset(OpKernelContext* context, const data::DatasetBase* input)
      : DatasetBase(data::DatasetContext(context)), input_(input) {
    input_->Ref();
  }
  ~TimedDataset() override { input_->Unref(); }

  const tensorflow::DataTypeVector& output_dtypes() const override { return input_->output_dtypes(); }
  const std::vector<tensorflow::PartialTensorShape>& output_shapes() const override { return input_->output_shapes(); }
  std::string DebugString() const override { return "PoseidonTimedDataset"; }
  int64_t CardinalityInternal(data::CardinalityOptions options) const override { return input_->Cardinality(options); }
  absl::Status InputDatasets(std::vector<const DatasetBase*>* inputs) const override {
    inputs->push_back(input_);
    return absl::OkStatus();
  }
  absl::Status CheckExternalState() const override { return input_->CheckExternalState(); }

 protected:
  absl::Status AsGraphDefInternal(data::SerializationContext* context, DatasetGraphDefBuilder* builder,
                                  tensorflow::Node** node) const override {
    tensorflow::Node* input;
    TF_RETURN_IF_ERROR(builder->AddInputDataset(context, input_, &input));
    return builder->AddDataset(this, {input}, node);
  }

  std::unique_ptr<data::IteratorBase> MakeIteratorInternal(const std::string& prefix) const override {
    return std::make_unique<Iterator>(Iterator::Params{this, prefix + "::PoseidonTimed"});
  }

 private:
  class Iterator : public data::DatasetIterator<TimedDataset> {
   public:
    using DatasetIterator::DatasetIterator;

    absl::Status Initialize(data::IteratorContext* context) override {
      return dataset()->input_->MakeIterator(context, this, prefix(), &input_);
    }

   protected:
    absl::Status GetNextInternal(data::IteratorContext* context, std::vector<Tensor>* element,
                                 bool* end_of_sequence) override {
      const Clock::time_point begin = Clock::now();
      TF_RETURN_IF_ERROR(input_->GetNext(context, element, end_of_sequence));
      Communicator* communicator = ProcessCommunicator();
      if (communicator && !*end_of_sequence) communicator->WaitedForBatch(begin, Clock::now());
      return absl::OkStatus();
    }

    std::shared_ptr<data::model::Node> CreateNode(data::IteratorContext*, data::model::Node::Args args) const override {
      return data::model::MakeKnownRatioNode(std::move(args), /*ratio=*/1);
    }

    absl::Status SaveInternal(data::SerializationContext* context, data::IteratorStateWriter* writer) override {
      return SaveInput(context, writer, input_);
    }

    absl::Status RestoreInternal(data::IteratorContext* context, data::IteratorStateReader* reader) override {
      return RestoreInput(context, reader, input_);
    }

   private:
    std::unique_ptr<data::IteratorBase> input_;
  };

  const data::DatasetBase* const input_;
};

class TimedDatasetKernel : public data::UnaryDatasetOpKernel {
 public:
  using UnaryDatasetOpKernel::UnaryDatasetOpKernel;

 protected:
  void MakeDataset(OpKernelContext* context, data::DatasetBase* input, data::DatasetBase** output) override {
    *output = new TimedDataset(context, input);
  }
};

REGISTER_KERNEL_BUILDER(Name("PoseidonTimedDataset").Device(tensorflow::DEVICE_CPU), TimedDatasetKernel);

}  // namespace
}  // namespace poseidon
