// What one block of threads does for U^T V, written once for two machines: the GPU
// (outer_product.cu.cc), and its emulation on the CPU (tests/gpu/emulated_gpu.cc). Tile numbers, edges,
// the layout of shared memory, the elements that a thread has, and the pipeline are therefore
// tested without a GPU.
//
// A tile of the result stays in registers while its products are added up. For the K of sufficient
// factors, time goes by the bytes of the result, which are written once; docs/gpu.md says why the
// tile is as large as it is.

#ifndef POSEIDON_CUDA_BLOCK_H_
#define POSEIDON_CUDA_BLOCK_H_

#include <stdint.h>

#include "../communicator/arithmetic.h"

#ifdef __CUDACC__
#define POSEIDON_HOST __host__
#define POSEIDON_DEVICE __device__ __forceinline__
#else
#define POSEIDON_HOST
#define POSEIDON_DEVICE inline
#endif

namespace poseidon {

// 2 x 4 warps with 64 x 64 elements each.
constexpr int kThreads = 256;
constexpr int kWarpTile = 64;
constexpr int kTileRows = 2 * kWarpTile;
constexpr int kTileColumns = 4 * kWarpTile;

// Rows of U and V that are in shared memory at a time: one stage is read while the others are
// filled. These are more bytes under way than the second-level cache delivers within its latency.
constexpr int kStages = 3;

// A float in memory that the tensor cores take rounded to 10 bits of its fraction.
struct Tf32 {
  float value;
};

// The smaller of the two. `value` may be negative, but by no more than a tile.
POSEIDON_DEVICE int AtMost(int limit, int64_t value) { return value < limit ? static_cast<int>(value) : limit; }

// Elements that one thread reads or writes at once.
template <typename T, int kBytes>
struct alignas(kBytes) Vector {
  static constexpr int kSize = kBytes / sizeof(T);
  T elements[kSize];
};

// U or V in memory.
struct Factor {
  const char* data;
  int64_t columns;
  int copy_bytes;  // 16, 4 or 2: rows are whole pieces of this size, which are aligned to it
};

// A thread's sums: of instructions [m][n], which have 16 x 8 elements of the warp's tile each, four
// registers.
using Sums = float[4][8][4];

// Where a thread is in the block's tile. An instruction of the tensor cores wants row or column
// `group` of the factors from a lane, and gives it columns 2 * `pair` and 2 * `pair` + 1 of rows
// `group` and `group` + 8. Which rows and columns of memory these are is ours to choose. Here an
// instruction takes one of every 4 neighbours, so that a lane reads 4 neighbours for 4
// instructions, and its sums are runs of `kVector` neighbours: 16 bytes of the result. 4 lanes
// write 64 bytes side by side, and nothing is exchanged between threads.
template <int kVector>
struct Lane {
  int row, column;  // of the warp's tile in the block's
  int group, pair;

  explicit POSEIDON_DEVICE Lane(unsigned thread)
      : row(thread / 32 % 2 * kWarpTile), column(thread / 64 * kWarpTile), group(thread % 32 / 4), pair(thread % 4) {}

  // The first of the 4 neighbours, rows or columns of the warp's tile, that the lane brings to
  // instructions 4 * half, ... + 3. An instruction takes one of V and two of U, for `group` and
  // `group` + 8.
  POSEIDON_DEVICE int Brings(int half) const {
    return 32 * half + 4 * (kVector == 4 ? group / 2 + group % 2 * 4 : group);
  }

  // The x-th of the lane's 8 rows of the warp's tile.
  POSEIDON_DEVICE int Row(int x) const { return Brings(x / 4) + x % 4; }

  // The first column of one of the lane's runs.
  POSEIDON_DEVICE int Column(int run) const { return kVector * (4 * run + pair); }

  // Element j of that run in the x-th row.
  static POSEIDON_DEVICE float Sum(const Sums& sums, int x, int run, int j) {
    const int n = kVector == 4 ? run / 2 * 4 + j : run * 4 + j % 4;
    const int odd = kVector == 4 ? run % 2 : j / 4;
    return sums[x / 2][n][x % 2 * 2 + odd];
  }
};

// How the rows of one stage lie in shared memory. Rows are 4 banks longer than a multiple of 32, so
// that lanes that read neighbouring rows meet different banks.
template <typename T>
struct Stage {
  static constexpr int kPadding = 16;
  static constexpr int kDepth = 64 / sizeof(T);  // rows
  static constexpr int kPitchU = kTileRows * sizeof(T) + kPadding;
  static constexpr int kPitchV = kTileColumns * sizeof(T) + kPadding;
  static constexpr int kBytesU = kDepth * kPitchU;
  static constexpr int kBytes = kBytesU + kDepth * kPitchV;
};

// Adds half a unit of the bits that the tensor cores read: they ignore the lower 13. So do
// infinities and NaN stay what they are. As cvt.rna.tf32, but ptxas makes six instructions of that,
// and two of this.
POSEIDON_DEVICE uint32_t RoundToTf32(float value) {
  union Word {
    float value;
    uint32_t bits;
  };
  Word word = {value};
  word.bits &= 0xff800000;  // the power of two
  word.value = value + word.value * 0x1p-11f;
  return word.bits;
}

// What a lane brings to the instructions of its warp's tile: two registers for each of 8 rows or
// columns.
using Fragments = uint32_t[8][2];

// Products by the tensor cores: of Bfloat16, Float16 or Tf32.
template <typename T, int kVector>
struct TensorCores {
  using Element = T;
  static constexpr int kRunSize = kVector;
  static constexpr int kDepth = 32 / sizeof(T);  // rows of U and V in one instruction

  // Adds the products of kDepth rows, which begin at `u` and `v` of shared memory.
  template <typename Machine>
  static POSEIDON_DEVICE void Multiply(Machine& machine, const Lane<kVector>& lane, int u, int v, Sums& sums) {
    Fragments fragments_u, fragments_v;
    Load(machine, lane, u + lane.row * int{sizeof(T)}, Stage<T>::kPitchU, fragments_u);
    Load(machine, lane, v + lane.column * int{sizeof(T)}, Stage<T>::kPitchV, fragments_v);
    machine.template MultiplyAdd<T>(fragments_u, fragments_v, sums);
  }

 private:
  template <typename Machine>
  static POSEIDON_DEVICE void Load(Machine& machine, const Lane<kVector>& lane, int shared, int pitch,
                                   Fragments& fragments) {
    for (int half = 0; half < 2; ++half) {
      const int column = shared + lane.Brings(half) * int{sizeof(T)};
      for (int high = 0; high < 2; ++high) {
        if constexpr (sizeof(T) == 2) {
          // A register has two rows of k, which are not neighbours in memory. The order of rows is
          // free as long as U and V agree; this one has no bank conflicts.
          using Words = Vector<uint32_t, 8>;
          constexpr int kNext = kVector == 4 ? 2 : 1;
          const int first = kVector == 4 ? lane.pair % 2 + lane.pair / 2 * 4 : lane.pair * 2;
          const int row = first + 8 * high;
          const Words x = machine.template LoadShared<Words>(column + row * pitch);
          const Words y = machine.template LoadShared<Words>(column + (row + kNext) * pitch);
          for (int i = 0; i < 2; ++i) {
            uint32_t (*to)[2] = &fragments[4 * half + 2 * i];
            to[0][high] = machine.LowerHalves(x.elements[i], y.elements[i]);
            to[1][high] = machine.UpperHalves(x.elements[i], y.elements[i]);
          }
        } else {
          const auto x = machine.template LoadShared<Vector<float, 16>>(column + (lane.pair + 4 * high) * pitch);
          for (int i = 0; i < 4; ++i) {
            fragments[4 * half + i][high] = RoundToTf32(x.elements[i]);
          }
        }
      }
    }
  }
};

// Products of float32 without tensor cores. A thread has the same elements as with them.
struct PlainFloats {
  using Element = float;
  static constexpr int kRunSize = 4;
  static constexpr int kDepth = 1;

  template <typename Machine>
  static POSEIDON_DEVICE void Multiply(Machine& machine, const Lane<kRunSize>& lane, int u, int v, Sums& sums) {
    using Floats = Vector<float, 16>;
    Floats rows[2], runs[4];
    for (int i = 0; i < 2; ++i) {
      rows[i] = machine.template LoadShared<Floats>(u + (lane.row + lane.Brings(i)) * 4);
    }
    for (int i = 0; i < 4; ++i) {
      runs[i] = machine.template LoadShared<Floats>(v + (lane.column + lane.Column(i)) * 4);
    }
    for (int m = 0; m < 4; ++m) {
      for (int n = 0; n < 8; ++n) {
        for (int c = 0; c < 4; ++c) {
          sums[m][n][c] += rows[m / 2].elements[m % 2 * 2 + c / 2] * runs[n / 4 * 2 + c % 2].elements[n % 4];
        }
      }
    }
  }
};

// Reads the first `count` elements of a run of the result: none if it is negative, all if it is large. Rows that are
// aligned have no incomplete runs.
template <bool kIsAligned, typename Machine, typename T>
POSEIDON_DEVICE void ReadRun(Machine& machine, const T* from, int count, Vector<T, 16>& run) {
  if constexpr (kIsAligned) {
    if (count > 0) run = machine.Read(reinterpret_cast<const Vector<T, 16>*>(from));
  } else {
    for (int j = 0; j < run.kSize; ++j) {
      if (j < count) run.elements[j] = machine.Read(from + j);
    }
  }
}

template <bool kIsAligned, typename Machine, typename T>
POSEIDON_DEVICE void WriteRun(Machine& machine, T* to, int count, const Vector<T, 16>& run) {
  if constexpr (kIsAligned) {
    if (count > 0) machine.Write(reinterpret_cast<Vector<T, 16>*>(to), run);
  } else {
    for (int j = 0; j < run.kSize; ++j) {
      if (j < count) machine.Write(to + j, run.elements[j]);
    }
  }
}

// out = alpha * products + beta * out.
template <typename Out>
struct Combine {
  static constexpr int kRunSize = 16 / sizeof(Out);
  static constexpr int kRowsAtOnce = 2;
  using Run = Vector<Out, 16>;
  struct Old {
    Run out;
  };

  float alpha, beta;
  Out* out;
  bool is_aligned;  // every row begins at a multiple of 16 bytes

  template <bool kIsAligned, typename Machine>
  POSEIDON_DEVICE void Read(Machine& machine, int64_t at, int count, Old& old) const {
    if (beta != 0) ReadRun<kIsAligned>(machine, out + at, count, old.out);
  }

  template <bool kIsAligned, typename Machine>
  POSEIDON_DEVICE void Write(Machine& machine, int64_t at, int count, const float* products, const Old& old) const {
    Run run;
    for (int j = 0; j < kRunSize; ++j) {
      float sum = alpha * products[j];
      if (beta != 0) sum += beta * machine.ToFloat(old.out.elements[j]);
      machine.Round(sum, run.elements[j]);
    }
    WriteRun<kIsAligned>(machine, out + at, count, run);
  }
};

// A step of gradient descent, see poseidon_outer_product_update.
template <bool kHasVelocity>
struct Descend {
  static constexpr int kRunSize = 4;
  static constexpr int kRowsAtOnce = kHasVelocity ? 1 : 2;
  using Run = Vector<float, 16>;
  struct Old {
    Run weights, velocity;
  };

  float learning_rate, momentum;
  bool nesterov;
  float* velocity;
  float* weights;
  bool is_aligned;  // every row of both

  template <bool kIsAligned, typename Machine>
  POSEIDON_DEVICE void Read(Machine& machine, int64_t at, int count, Old& old) const {
    ReadRun<kIsAligned>(machine, weights + at, count, old.weights);
    if constexpr (kHasVelocity) ReadRun<kIsAligned>(machine, velocity + at, count, old.velocity);
  }

  template <bool kIsAligned, typename Machine>
  POSEIDON_DEVICE void Write(Machine& machine, int64_t at, int count, const float* products, const Old& old) const {
    Run new_weights, new_velocity;
    for (int j = 0; j < kRunSize; ++j) {
      const float descent = -learning_rate * products[j];
      float step = descent;
      if constexpr (kHasVelocity) {
        step += momentum * old.velocity.elements[j];
        new_velocity.elements[j] = step;
        if (nesterov) step = momentum * step + descent;
      }
      new_weights.elements[j] = old.weights.elements[j] + step;
    }
    if constexpr (kHasVelocity) WriteRun<kIsAligned>(machine, velocity + at, count, new_velocity);
    WriteRun<kIsAligned>(machine, weights + at, count, new_weights);
  }
};

// The elements of the result that a block computes together.
struct Tile {
  int64_t row, column;  // of its first element

  // How many tiles cover `size` elements.
  static POSEIDON_HOST POSEIDON_DEVICE int64_t Count(int64_t size, int tile_size) {
    return size / tile_size + (size % tile_size != 0);
  }

  // Tiles are numbered down the columns of bands of 8 tiles' height: blocks that run at the same
  // time share rows of U and of V in the second-level cache.
  static POSEIDON_DEVICE Tile At(int64_t number, int64_t m, int64_t n) {
    constexpr int kBand = 8;
    const int64_t columns = Count(n, kTileColumns);
    const int64_t first = number / (kBand * columns) * kBand;
    const int64_t left = Count(m, kTileRows) - first;
    const int64_t height = left < kBand ? left : kBand;
    const int64_t in_band = number - first * columns;
    return {(first + in_band % height) * kTileRows, in_band / height * kTileColumns};
  }
};

// The program of a block, with `Product` one of TensorCores and PlainFloats, and `Epilogue` of
// Combine and Descend.
template <typename Product, typename Epilogue>
class Program {
 public:
  using T = typename Product::Element;
  static constexpr int kSharedBytes = kStages * Stage<T>::kBytes;

  struct Arguments {
    Factor u, v;
    int64_t k, m, n;
    int64_t end_tile;
    Epilogue epilogue;
  };

  // Computes every machine.tile_step()-th tile from machine.first_tile() on. Copies into shared
  // memory run ahead over the end of a tile: those of the next come while this one's result is
  // written.
  template <typename Machine>
  static POSEIDON_DEVICE void Run(Machine& machine, const Arguments& a) {
    Position next{machine.first_tile(), 0, {}};
    for (int stage = 0; stage < kStages - 1; ++stage) Fill(machine, a, stage, next);
    int stage = 0;
    for (int64_t tile = machine.first_tile(); tile < a.end_tile; tile += machine.tile_step()) {
      const Lane<Product::kRunSize> lane(machine.thread());
      Sums sums = {};
      for (int64_t row = 0; row < a.k; row += Stage<T>::kDepth) {
        // Now the thread's own copies into this stage are there, then those of all others; and
        // nobody reads the stage before this one any more.
        machine.template WaitForCopies<kStages - 2>();
        machine.Barrier();
        Fill(machine, a, stage == 0 ? kStages - 1 : stage - 1, next);
        const int u = stage * Stage<T>::kBytes, v = u + Stage<T>::kBytesU;
#pragma unroll
        for (int r = 0; r < Stage<T>::kDepth; r += Product::kDepth) {
          Product::Multiply(machine, lane, u + r * Stage<T>::kPitchU, v + r * Stage<T>::kPitchV, sums);
        }
        stage = stage == kStages - 1 ? 0 : stage + 1;
      }
      const Tile corner = Tile::At(tile, a.m, a.n);
      if (a.epilogue.is_aligned) {
        Finish<true>(machine, a, corner, sums);
      } else {
        Finish<false>(machine, a, corner, sums);
      }
    }
  }

 private:
  // What is copied next.
  struct Position {
    int64_t tile, row;  // of U and V
    Tile corner;        // where that tile begins
  };

  // Starts to copy the rows of U and V at `next` and moves it on. Where it is at the end, there is
  // nothing to copy, but still something to wait for, so that waiting can count.
  template <typename Machine>
  static POSEIDON_DEVICE void Fill(Machine& machine, const Arguments& a, int stage, Position& next) {
    if (next.tile < a.end_tile && next.row < a.k) {
      if (next.row == 0) next.corner = Tile::At(next.tile, a.m, a.n);
      const int u = stage * Stage<T>::kBytes, v = u + Stage<T>::kBytesU;
      Copy<kTileRows>(machine, a.u, a.k, next.row, next.corner.row, u, Stage<T>::kPitchU);
      Copy<kTileColumns>(machine, a.v, a.k, next.row, next.corner.column, v, Stage<T>::kPitchV);
      next.row += Stage<T>::kDepth;
      if (next.row >= a.k) {
        next.tile += machine.tile_step();
        next.row = 0;
      }
    }
    machine.CommitCopies();
  }

  // The largest pieces that the alignment of the rows allows.
  template <int kColumns, typename Machine>
  static POSEIDON_DEVICE void Copy(Machine& machine, const Factor& factor, int64_t k, int64_t row, int64_t column,
                                   int shared, int pitch) {
    switch (factor.copy_bytes) {
      case 16:
        return CopyPieces<kColumns, 16>(machine, factor, k, row, column, shared, pitch);
      case 4:
        return CopyPieces<kColumns, 4>(machine, factor, k, row, column, shared, pitch);
      default:
        return CopyPieces<kColumns, sizeof(T)>(machine, factor, k, row, column, shared, pitch);
    }
  }

  // Elements outside of the factor become zeros, so that they add nothing.
  template <int kColumns, int kBytes, typename Machine>
  static POSEIDON_DEVICE void CopyPieces(Machine& machine, const Factor& factor, int64_t k, int64_t row, int64_t column,
                                         int shared, int pitch) {
    constexpr int kPiece = kBytes / sizeof(T);
    constexpr int kPieces = kColumns / kPiece;  // of a row
    constexpr int kRowsAtOnce = kThreads / kPieces;
    const unsigned thread = machine.thread();
    const int c = static_cast<int>(thread % kPieces) * kPiece;
    const int rows = AtMost(Stage<T>::kDepth, k - row);
    const bool has_column = c < AtMost(kColumns, factor.columns - column);
    int r = static_cast<int>(thread / kPieces);
    const char* from = factor.data + ((row + r) * factor.columns + column + c) * int64_t{sizeof(T)};
    shared += r * pitch + c * int{sizeof(T)};
#pragma unroll(4)
    for (int i = 0; i < Stage<T>::kDepth / kRowsAtOnce; ++i) {
      machine.template Copy<kBytes>(shared, from, has_column && r < rows);
      r += kRowsAtOnce;
      from += kRowsAtOnce * factor.columns * int64_t{sizeof(T)};
      shared += kRowsAtOnce * pitch;
    }
  }

  // Hands what a thread has computed to the epilogue, some runs at a time: all that these need is
  // read before any of it is written, so that the reads overlap.
  template <bool kIsAligned, typename Machine>
  static POSEIDON_DEVICE void Finish(Machine& machine, const Arguments& a, const Tile& tile, const Sums& sums) {
    constexpr int kRunSize = Product::kRunSize;
    static_assert(kRunSize == Epilogue::kRunSize, "a lane's sums make whole vectors of the result");
    constexpr int kRunsOfRow = kWarpTile / 4 / kRunSize;
    constexpr int kRuns = 8 * kRunsOfRow;
    constexpr int kBatch = kIsAligned ? Epilogue::kRowsAtOnce * kRunsOfRow : 1;
    const Lane<kRunSize> lane(machine.thread());
    // The warp's tile in the result, and how much of it is there. All else fits into 32 bits.
    const int64_t row = tile.row + lane.row, column = tile.column + lane.column;
    const int rows = AtMost(kWarpTile, a.m - row), columns = AtMost(kWarpTile, a.n - column);
#pragma unroll
    for (int first = 0; first < kRuns; first += kBatch) {
      typename Epilogue::Old old[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int r = lane.Row((first + i) / kRunsOfRow), c = lane.Column((first + i) % kRunsOfRow);
        a.epilogue.template Read<kIsAligned>(machine, (row + r) * a.n + column + c, r < rows ? columns - c : 0, old[i]);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int x = (first + i) / kRunsOfRow, run = (first + i) % kRunsOfRow;
        const int r = lane.Row(x), c = lane.Column(run);
        float products[kRunSize];
        for (int j = 0; j < kRunSize; ++j) products[j] = lane.Sum(sums, x, run, j);
        a.epilogue.template Write<kIsAligned>(machine, (row + r) * a.n + column + c, r < rows ? columns - c : 0,
                                              products, old[i]);
      }
    }
  }
};

}  // namespace poseidon

#endif  // POSEIDON_CUDA_BLOCK_H_
