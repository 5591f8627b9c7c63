// TensorFlow's element types in the communicator's terms.

#ifndef POSEIDON_DTYPES_H_
#define POSEIDON_DTYPES_H_

#include "sum.h"
#include "tensorflow/core/framework/types.h"

namespace poseidon {

inline DataType ToDataType(tensorflow::DataType dtype) {
  switch (dtype) {
    case tensorflow::DT_FLOAT:
      return DataType::kFloat32;
    case tensorflow::DT_DOUBLE:
      return DataType::kFloat64;
    case tensorflow::DT_HALF:
      return DataType::kFloat16;
    case tensorflow::DT_BFLOAT16:
      return DataType::kBfloat16;
    case tensorflow::DT_INT32:
      return DataType::kInt32;
    case tensorflow::DT_INT64:
      return DataType::kInt64;
    default:
      return DataType::kBytes;
  }
}

// The same for elements that are moved and not added: of a type that it has not, one that is as wide.
inline DataType ToMovedDataType(tensorflow::DataType dtype) {
  if (const DataType own = ToDataType(dtype); own != DataType::kBytes) return own;
  switch (tensorflow::DataTypeSize(dtype)) {
    case 2:
      return DataType::kFloat16;
    case 4:
      return DataType::kInt32;
    case 8:
      return DataType::kInt64;
    default:
      return DataType::kBytes;
  }
}

}  // namespace poseidon

#endif  // POSEIDON_DTYPES_H_
