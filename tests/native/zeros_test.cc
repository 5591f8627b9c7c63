// Matrices without their zeros: every length and density comes back with the same bits, and other bytes are refused.
// The build for the sanitizer of threads has the portable code alone.

#include "zeros.h"

#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.h"

using namespace poseidon;

namespace {

// A matrix in memory that ends with it, in which a share of the elements is not zero.
template <typename T>
std::vector<T> Matrix(size_t elements, double density, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> number;
  std::vector<T> matrix(elements);
  for (T& element : matrix) {
    if (number(random) < density) element = static_cast<T>(random() | 1);
  }
  return matrix;
}

template <typename T>
void CheckCode(const std::vector<T>& matrix, const std::string& where) {
  const size_t bytes = matrix.size() * sizeof(T);
  size_t count = 0;
  for (T element : matrix) count += element != 0;
  const size_t length = 8 + (matrix.size() + 63) / 64 * 8 + count * sizeof(T);
  const WithoutZeros code = LeaveOutZeros(matrix.data(), bytes, sizeof(T), 0);
  if (length >= bytes) return EXPECT(!code, where);
  EXPECT(static_cast<bool>(code), where);
  EXPECT_EQ(code.bytes, length, where);
  // Behind a code, there may be anything.
  std::vector<uint64_t> copy((length + 7) / 8);
  std::memcpy(copy.data(), code.data.get(), length);
  const auto decoded = MatrixBytes(copy.data(), length, sizeof(T));
  EXPECT(decoded == bytes, where);
  std::vector<T> back(matrix.size() + 1, T{7});
  PutBackZeros(copy.data(), sizeof(T), back.data());
  EXPECT(std::memcmp(back.data(), matrix.data(), bytes) == 0, where);
  EXPECT_EQ(back.back(), T{7}, where);
  for (size_t shorter : {size_t{0}, size_t{7}, size_t{8}, length - sizeof(T), length - 1}) {
    EXPECT(!MatrixBytes(copy.data(), shorter, sizeof(T)), where);
  }
}

template <typename T>
void CheckLengths() {
  for (size_t elements : {0, 1, 5, 63, 64, 65, 127, 128, 129, 1000, 4096, 20000}) {
    for (double density : {0.0, 0.01, 0.3, 0.5, 0.9}) {
      CheckCode(Matrix<T>(elements, density, elements + 7), std::to_string(8 * sizeof(T)) + " bits, " +
                                                                std::to_string(elements) + " elements, density " +
                                                                std::to_string(density));
    }
  }
}

}  // namespace

TEST(MatricesComeBackWithTheSameBits) {
  CheckLengths<uint16_t>();
  CheckLengths<uint32_t>();
  CheckLengths<uint64_t>();
}

TEST(NegativeZerosNaNAndSubnormalNumbersStay) {
  std::vector<float> matrix(1000);
  matrix[3] = -0.0f;
  matrix[500] = std::numeric_limits<float>::quiet_NaN();
  matrix[998] = -std::numeric_limits<float>::infinity();
  matrix[999] = std::numeric_limits<float>::denorm_min();
  const WithoutZeros code = LeaveOutZeros(matrix.data(), 4000, 4, 0);
  EXPECT(code && code.bytes == 8 + 16 * 8 + 4 * 4, "four elements are left");
  std::vector<float> back(1000);
  PutBackZeros(code.data.get(), 4, back.data());
  EXPECT(std::memcmp(back.data(), matrix.data(), 4000) == 0, "");
}

TEST(DenseMatricesHaveNoCode) {
  for (size_t elements : {1000, 100000}) {
    for (double density : {1.0, 0.98}) {
      const auto matrix = Matrix<uint32_t>(elements, density, 1);
      EXPECT(!LeaveOutZeros(matrix.data(), 4 * elements, 4, 0), std::to_string(elements));
    }
  }
}

TEST(ZerosStayWhereTooLittleIsSaved) {
  for (size_t elements : {1000, 100000}) {
    const auto matrix = Matrix<uint32_t>(elements, 0.5, 1);  // 47 % are saved
    for (double least : {0.0, 0.4, 0.44, 0.5, 0.9}) {
      const WithoutZeros left = LeaveOutZeros(matrix.data(), 4 * elements, 4, least);
      EXPECT_EQ(static_cast<bool>(left), least < 0.47, std::to_string(least));
    }
  }
}

TEST(ColumnsThatAreDenseDoNotHideTheOthers) {
  for (size_t rows : {32, 64, 128}) {
    auto matrix = Matrix<uint32_t>(rows * 4096, 0.01, 1);
    for (size_t i = 0; i < matrix.size(); ++i) matrix[i] |= i % 4096 < 64;
    EXPECT(static_cast<bool>(LeaveOutZeros(matrix.data(), 4 * matrix.size(), 4, 0)), std::to_string(rows));
  }
}

TEST(ElementsHaveTwoFourOrEightBytes) {
  const std::vector<char> matrix(4096);
  for (size_t element : {0, 1, 3, 16}) EXPECT(!LeaveOutZeros(matrix.data(), 4096, element, 0), "another size");
}

TEST(OtherBytesAreRefused) {
  const auto matrix = Matrix<uint32_t>(100, 0.2, 5);
  const WithoutZeros code = LeaveOutZeros(matrix.data(), 400, 4, 0);
  const auto changed = [&](size_t word, uint64_t bits) {
    std::vector<uint64_t> words((code.bytes + 7) / 8);
    std::memcpy(words.data(), code.data.get(), code.bytes);
    words[word] ^= bits;
    return MatrixBytes(words.data(), code.bytes, 4);
  };
  EXPECT(changed(0, 0) == size_t{400}, "unchanged");
  EXPECT(!changed(0, 64), "another number of elements");
  EXPECT(!changed(0, uint64_t{1} << 63), "more elements than any matrix has");
  EXPECT(!changed(1, 1), "another number of elements that are not zero");
  EXPECT(!changed(2, uint64_t{1} << 40), "a bit behind the last element");
}
