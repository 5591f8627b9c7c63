// A dataset that chooses a rank's elements of each batch, before anything is made of them.
//
// Datasets of TensorFlow can do so too, by windows, but take longer for a rank's elements than a step of a small model.
//
// Tests: tests/unit/test_row_selection.py.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "row_shares.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/full_type_util.h"
#include "tensorflow/core/framework/op.h"
#include "xxh64.h"

namespace poseidon {
namespace {

namespace data = tensorflow::data;
namespace full_type = tensorflow::full_type;
using Element = std::vector<tensorflow::Tensor>;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::tstring;

REGISTER_OP("PoseidonOwnElementsDataset")
    .Input("input_dataset: variant")
    .Input("shares: variant")
    .Output("handle: variant")
    .Attr("batch_size: int >= 1")
    .Attr("drop_remainder: bool")
    .Attr("rank: int >= 0")
    .Attr("ranks: int >= 1")
    .Attr("output_types: list(type) >= 1")
    .Attr("output_shapes: list(shape) >= 1")
    .SetTypeConstructor(full_type::VariadicTensorContainer(tensorflow::TFT_DATASET, "output_types"))
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Returns a dataset of a rank's elements of each batch of another one, with a tag in front of their tensors.

A tag is [4] int64: how many elements the batch has; the first of this rank's, and how many it has, 0 if the first one
of the batch stands in for them; and a digest of all elements of the first batch, 0 in the others.

shares: A dataset, from which one element is read when a batch was: [P] int64, by rank, how many elements of the batch it
  has in proportion to others.
batch_size: How many successive elements are a batch.
drop_remainder: Whether elements at the end that make no full batch are left out.
rank, ranks: The rank, and how many there are. P.
output_types, output_shapes: Those of a tag, and of the other dataset.
)doc");

constexpr int64_t kIdentifying = 1024;  // numbers of a tensor that are compared: it may be a whole array

// Returns the end of a path, its folder and its name: hosts may have folders elsewhere.
absl::string_view Identifying(const tstring& text) {
  const absl::string_view path(text);
  const size_t name = path.rfind('/');
  const size_t folder = name == 0 || name == path.npos ? path.npos : path.rfind('/', name - 1);
  return folder == path.npos ? path : path.substr(folder + 1);
}

// Returns a digest of what tells elements from others, and of their order.
int64_t Digest(const std::vector<Element>& elements) {
  uint64_t digest = 0;
  for (const Element& element : elements) {
    for (const Tensor& value : element) {
      if (value.dtype() == tensorflow::DT_STRING) {
        const auto texts = value.flat<tstring>();
        for (int64_t i = 0; i < texts.size(); ++i) {
          const absl::string_view text = Identifying(texts(i));
          digest = Xxh64(text.data(), text.size(), digest);
        }
      } else if (tensorflow::DataTypeCanUseMemcpy(value.dtype())) {
        const absl::string_view bytes = value.tensor_data();
        const size_t most = kIdentifying * tensorflow::DataTypeSize(value.dtype());
        digest = Xxh64(bytes.data(), std::min(bytes.size(), most), digest);
      }
    }
  }
  return static_cast<int64_t>(digest);
}

struct Attributes {
  int64_t batch_size;
  bool drop_remainder;
  int64_t rank;
  int64_t ranks;
  tensorflow::DataTypeVector types;
  std::vector<tensorflow::PartialTensorShape> shapes;
};

class OwnElementsDataset : public data::DatasetBase {
 public:
  OwnElementsDataset(OpKernelContext* context, const data::DatasetBase* input, const data::DatasetBase* shares,
                     const Attributes& attributes)
      : DatasetBase(data::DatasetContext(context)), input_(input), shares_(shares), attributes_(attributes) {
    input_->Ref();
    shares_->Ref();
  }
  ~OwnElementsDataset() override {
    input_->Unref();
    shares_->Unref();
  }

  const tensorflow::DataTypeVector& output_dtypes() const override { return attributes_.types; }
  const std::vector<tensorflow::PartialTensorShape>& output_shapes() const override { return attributes_.shapes; }
  std::string DebugString() const override { return "PoseidonOwnElementsDataset"; }
  int64_t CardinalityInternal(data::CardinalityOptions options) const override {
    return input_->Cardinality(options) == data::kInfiniteCardinality ? data::kInfiniteCardinality
                                                                      : data::kUnknownCardinality;
  }
  absl::Status InputDatasets(std::vector<const DatasetBase*>* inputs) const override {
    inputs->push_back(input_);
    inputs->push_back(shares_);
    return absl::OkStatus();
  }
  absl::Status CheckExternalState() const override {
    TF_RETURN_IF_ERROR(shares_->CheckExternalState());
    return input_->CheckExternalState();
  }

 protected:
  absl::Status AsGraphDefInternal(data::SerializationContext* context, DatasetGraphDefBuilder* builder,
                                  tensorflow::Node** node) const override {
    tensorflow::Node *input, *shares;
    TF_RETURN_IF_ERROR(builder->AddInputDataset(context, input_, &input));
    TF_RETURN_IF_ERROR(builder->AddInputDataset(context, shares_, &shares));
    return builder->AddDataset(this, {input, shares},
                               {{"batch_size", builder->BuildAttrValue(attributes_.batch_size)},
                                {"drop_remainder", builder->BuildAttrValue(attributes_.drop_remainder)},
                                {"rank", builder->BuildAttrValue(attributes_.rank)},
                                {"ranks", builder->BuildAttrValue(attributes_.ranks)}},
                               node);
  }

  std::unique_ptr<data::IteratorBase> MakeIteratorInternal(const std::string& prefix) const override {
    return std::make_unique<Iterator>(Iterator::Params{this, prefix + "::PoseidonOwnElements"});
  }

 private:
  class Iterator : public data::DatasetIterator<OwnElementsDataset> {
   public:
    using DatasetIterator::DatasetIterator;

    absl::Status Initialize(data::IteratorContext* context) override {
      TF_RETURN_IF_ERROR(dataset()->shares_->MakeIterator(context, this, prefix() + "[shares]", &shares_));
      return dataset()->input_->MakeIterator(context, this, prefix(), &input_);
    }

   protected:
    absl::Status GetNextInternal(data::IteratorContext* context, Element* element, bool* end_of_sequence) override {
      std::lock_guard<std::mutex> lock(mutex_);
      if (own_.empty()) TF_RETURN_IF_ERROR(ReadBatch(context));
      *end_of_sequence = own_.empty();
      if (own_.empty()) return absl::OkStatus();
      *element = std::move(own_.back());
      own_.pop_back();
      return absl::OkStatus();
    }

    std::shared_ptr<data::model::Node> CreateNode(data::IteratorContext*, data::model::Node::Args args) const override {
      return data::model::MakeKnownRatioNode(std::move(args), static_cast<double>(dataset()->attributes_.ranks));
    }

    absl::Status SaveInternal(data::SerializationContext* context, data::IteratorStateWriter* writer) override {
      std::lock_guard<std::mutex> lock(mutex_);
      TF_RETURN_IF_ERROR(SaveInput(context, writer, input_));
      TF_RETURN_IF_ERROR(SaveInput(context, writer, shares_));
      TF_RETURN_IF_ERROR(writer->WriteScalar(prefix(), kHasRead, int64_t{has_read_}));
      TF_RETURN_IF_ERROR(writer->WriteScalar(prefix(), kLeft, static_cast<int64_t>(own_.size())));
      for (size_t i = 0; i < own_.size(); ++i) {
        for (size_t j = 0; j < own_[i].size(); ++j) {
          TF_RETURN_IF_ERROR(writer->WriteTensor(prefix(), Key(i, j), own_[i][j]));
        }
      }
      return absl::OkStatus();
    }

    absl::Status RestoreInternal(data::IteratorContext* context, data::IteratorStateReader* reader) override {
      std::lock_guard<std::mutex> lock(mutex_);
      TF_RETURN_IF_ERROR(RestoreInput(context, reader, input_));
      TF_RETURN_IF_ERROR(RestoreInput(context, reader, shares_));
      int64_t has_read, left;
      TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), kHasRead, &has_read));
      TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), kLeft, &left));
      has_read_ = has_read != 0;
      own_.assign(left, Element(dataset()->attributes_.types.size()));
      for (size_t i = 0; i < own_.size(); ++i) {
        for (size_t j = 0; j < own_[i].size(); ++j) {
          TF_RETURN_IF_ERROR(reader->ReadTensor(context->flr(), prefix(), Key(i, j), &own_[i][j]));
        }
      }
      return absl::OkStatus();
    }

   private:
    static constexpr char kHasRead[] = "has_read", kLeft[] = "left";

    static std::string Key(size_t element, size_t tensor) { return absl::StrCat("own[", element, "][", tensor, "]"); }

    // Reads a batch, and keeps what this rank has of it; nothing at the end.
    absl::Status ReadBatch(data::IteratorContext* context) {
      const Attributes& attributes = dataset()->attributes_;
      std::vector<Element> elements;
      elements.reserve(attributes.batch_size);
      for (bool is_over = false; elements.size() < static_cast<size_t>(attributes.batch_size);) {
        Element element;
        TF_RETURN_IF_ERROR(input_->GetNext(context, &element, &is_over));
        if (is_over) break;
        elements.push_back(std::move(element));
      }
      const int64_t total = elements.size();
      if (total == 0 || (attributes.drop_remainder && total < attributes.batch_size)) return absl::OkStatus();
      TF_ASSIGN_OR_RETURN(const RowRange range, Own(context, total));
      const int64_t first = range.count > 0 ? range.first : 0;
      Tensor tag(tensorflow::DT_INT64, {4});
      auto numbers = tag.flat<int64_t>();
      numbers(0) = total;
      numbers(1) = first;
      numbers(2) = range.count;
      numbers(3) = std::exchange(has_read_, true) ? 0 : Digest(elements);
      for (int64_t i = first + std::max<int64_t>(range.count, 1) - 1; i >= first; --i) {
        own_.push_back({tag});
        own_.back().insert(own_.back().end(), std::make_move_iterator(elements[i].begin()),
                           std::make_move_iterator(elements[i].end()));
      }
      return absl::OkStatus();
    }

    // Returns this rank's elements of a batch of `total`.
    absl::StatusOr<RowRange> Own(data::IteratorContext* context, int64_t total) {
      const Attributes& attributes = dataset()->attributes_;
      Element element;
      bool is_over;
      TF_RETURN_IF_ERROR(shares_->GetNext(context, &element, &is_over));
      if (is_over || element.size() != 1 || element[0].dtype() != tensorflow::DT_INT64 ||
          element[0].NumElements() != attributes.ranks) {
        return absl::InvalidArgumentError(
            absl::StrCat("A batch has no shares, expected ", attributes.ranks, " int64s; give more elements."));
      }
      const auto numbers = element[0].flat<int64_t>();
      RowShares shares;
      shares.Set(std::vector<int64_t>(numbers.data(), numbers.data() + numbers.size()));
      return shares.Of(total, attributes.rank, attributes.ranks);
    }

    std::mutex mutex_;  // guards what follows
    std::unique_ptr<data::IteratorBase> input_;
    std::unique_ptr<data::IteratorBase> shares_;
    std::vector<Element> own_;  // what is left of a batch, the next one last
    bool has_read_ = false;     // a batch
  };

  const data::DatasetBase* const input_;
  const data::DatasetBase* const shares_;
  const Attributes attributes_;
};

class OwnElementsDatasetKernel : public data::BinaryDatasetOpKernel {
 public:
  explicit OwnElementsDatasetKernel(tensorflow::OpKernelConstruction* context) : BinaryDatasetOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("batch_size", &attributes_.batch_size));
    OP_REQUIRES_OK(context, context->GetAttr("drop_remainder", &attributes_.drop_remainder));
    OP_REQUIRES_OK(context, context->GetAttr("rank", &attributes_.rank));
    OP_REQUIRES_OK(context, context->GetAttr("ranks", &attributes_.ranks));
    OP_REQUIRES_OK(context, context->GetAttr("output_types", &attributes_.types));
    OP_REQUIRES_OK(context, context->GetAttr("output_shapes", &attributes_.shapes));
  }

 protected:
  void MakeDataset(OpKernelContext* context, data::DatasetBase* input, data::DatasetBase* shares,
                   data::DatasetBase** output) override {
    *output = new OwnElementsDataset(context, input, shares, attributes_);
  }

 private:
  Attributes attributes_;
};

REGISTER_KERNEL_BUILDER(Name("PoseidonOwnElementsDataset").Device(tensorflow::DEVICE_CPU), OwnElementsDatasetKernel);

}  // namespace
}  // namespace poseidon
