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

// Threads of a block, and rows and columns of its tile.
constexpr int kThreads = 128;
constexpr int kTile = 128;

// So many fit into the registers of a multiprocessor, and into the shared memory of most: one multiplies
// while the other writes.
constexpr int kBlocksPerMultiprocessor = 2;

// A float in memory that the tensor cores take rounded to 10 bits of its fraction.
struct Tf32 {
  float value;
};

// The smaller of the two. `value` is not negative.
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

// Which elements of the tile a thread of `mma.sync` has. A warp has 64 x 64 elements, an instruction
// wants row or column `group` of the factors from a lane, and gives it columns 2 * `pair` and 2 *
// `pair` + 1 of rows `group` and `group` + 8. Which rows and columns of memory these are is ours to
// choose. Here an instruction takes one of every 4 neighbours, so that a lane reads 4 neighbours for
// 4 instructions, and its sums are runs of `kVector` neighbours: 16 bytes of the result. 4 lanes
// write 64 bytes side by side, and nothing is exchanged between threads.
template <int kVector>
struct WarpLane {
  static constexpr int kWarpTile = 64;
  static constexpr int kRunsOfRow = kWarpTile / 4 / kVector;

  int row, column;  // of the warp's tile in the block's
  int group, pair;

  explicit POSEIDON_DEVICE WarpLane(unsigned thread)
      : row(thread / 32 % 2 * kWarpTile), column(thread / 64 * kWarpTile), group(thread % 32 / 4), pair(thread % 4) {}

  // The first of the 4 neighbours, rows or columns of the warp's tile, that the lane brings to
  // instructions 4 * half, ... + 3. An instruction takes one of V and two of U, for `group` and
  // `group` + 8.
  POSEIDON_DEVICE int Brings(int half) const {
    return 32 * half + 4 * (kVector == 4 ? group / 2 + group % 2 * 4 : group);
  }

  // The x-th of the lane's 8 rows.
  POSEIDON_DEVICE int Row(int x) const { return row + Brings(x / 4) + x % 4; }

  // The first column of one of the lane's runs.
  POSEIDON_DEVICE int Column(int run) const { return column + kVector * (4 * run + pair); }

  // Element j of that run in the x-th row.
  static POSEIDON_DEVICE float Sum(const Sums& sums, int x, int run, int j) {
    const int n = kVector == 4 ? run / 2 * 4 + j : run * 4 + j % 4;
    const int odd = kVector == 4 ? run % 2 : j / 4;
    return sums[x / 2][n][x % 2 * 2 + odd];
  }
};

// Which elements of the tile a thread of `wgmma` has. Instruction m gives warp w rows 64 * m + 16 * w
// and the next 15, and of these a lane's share is as in `mma.sync`, for each of 16 blocks of 8 columns:
// pairs of neighbours. Settle() has lanes exchange pairs for runs of `kVector`: 16 bytes of the
// result. 4 lanes then write 64 bytes of a row. With less of a row at once, writing takes longer.
template <int kVector>
struct WarpgroupLane {
  static_assert(kVector == 4 || kVector == 8, "half the columns of a block, or all");
  static constexpr int kRunsOfRow = 32 / kVector;

  int row, pair;

  explicit POSEIDON_DEVICE WarpgroupLane(unsigned thread) : row(thread / 32 * 16 + thread % 32 / 4), pair(thread % 4) {}

  // The x-th of the lane's 4 rows.
  POSEIDON_DEVICE int Row(int x) const { return row + 64 * (x / 2) + 8 * (x % 2); }

  // The first column of one of the lane's runs.
  POSEIDON_DEVICE int Column(int run) const {
    return kVector == 4 ? 8 * (2 * run + pair % 2) + pair / 2 * 4 : 8 * (4 * run + pair);
  }

  // Element j of that run in the x-th row.
  static POSEIDON_DEVICE float Sum(const Sums& sums, int x, int run, int j) {
    return Block(sums, x / 2, run * kVector / 2 + j / 2)[x % 2 * 2 + j % 2];
  }

  // Exchanges pairs of sums, so that each lane has whole runs: of two blocks with one other lane, or of
  // 4 blocks among 4 lanes. If `kAreRounded`, a pair is two rounded elements in its first float.
  template <bool kAreRounded, typename Machine>
  POSEIDON_DEVICE void Settle(Machine& machine, Sums& sums) const {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int bit = 1; bit < kVector / 2; bit *= 2) {
#pragma unroll
        for (int n = 0; n < 16; ++n) {
          if (n & bit) continue;
#pragma unroll
          for (int i = 0; i < 4; i += kAreRounded ? 2 : 1) {
            Swap(machine, bit, Block(sums, m, n)[i], Block(sums, m, n | bit)[i]);
          }
        }
      }
    }
  }

 private:
  // The sums of the n-th block in instruction m: two of the lane's first row, and two of its second.
  template <typename AnySums>
  static POSEIDON_DEVICE auto& Block(AnySums& sums, int m, int n) {
    return sums[2 * m + n / 8][n % 8];
  }

  // Of two lanes whose numbers differ in `bit`, the lower gives its y for the x of the other.
  template <typename Machine>
  POSEIDON_DEVICE void Swap(Machine& machine, int bit, float& x, float& y) const {
    const bool is_lower = (pair & bit) == 0;
    const float other = machine.Exchange(is_lower ? y : x, bit);
    (is_lower ? y : x) = other;
  }
};

// How some rows of kTile columns of U or V lie in shared memory. Here rows are 4 banks longer than a
// multiple of 32, so that lanes that read neighbouring rows meet different banks.
template <typename T>
struct PaddedPanel {
  static constexpr int kDepth = 64 / sizeof(T);  // rows
  static constexpr int kPitch = kTile * sizeof(T) + 16;
  static constexpr int kBytes = kDepth * kPitch;

  static POSEIDON_DEVICE int At(int row, int column) { return row * kPitch + column * int{sizeof(T)}; }
};

// The layout that `wgmma` reads, and the copy engine writes, with a swizzle of 128 bytes: two boxes of
// 64 columns, in whose rows the 8 pieces of 16 bytes are permuted. Its address is a multiple of 1024.
template <typename T>
struct SwizzledPanel {
  static_assert(sizeof(T) == 2, "`wgmma` transposes 16-bit types alone");
  static constexpr int kDepth = 64;
  static constexpr int kPitch = 128;
  static constexpr int kBoxBytes = kDepth * kPitch;
  static constexpr int kBytes = 2 * kBoxBytes;
};

// The elements of the result that a block computes together.
struct Tile {
  int64_t row, column;  // of its first element

  // How many tiles cover `size` elements.
  static POSEIDON_HOST POSEIDON_DEVICE int64_t Count(int64_t size) { return size / kTile + (size % kTile != 0); }

  // Tiles are numbered down the columns of bands of 8 tiles' height: blocks that run at the same
  // time share rows of U and of V in the second-level cache.
  static POSEIDON_DEVICE Tile At(int64_t number, int64_t m, int64_t n) {
    constexpr int kBand = 8;
    const int64_t columns = Count(n);
    const int64_t first = number / (kBand * columns) * kBand;
    const int64_t left = Count(m) - first;
    const int64_t height = left < kBand ? left : kBand;
    const int64_t in_band = number - first * columns;
    return {(first + in_band % height) * kTile, in_band / height * kTile};
  }
};

// U and V of a call, and how many tiles its result has.
struct Factors {
  Factor u, v;
  int64_t k;
  int64_t end_tile;

  // Of the result.
  POSEIDON_DEVICE int64_t m() const { return u.columns; }
  POSEIDON_DEVICE int64_t n() const { return v.columns; }
};

// What is copied next: rows of U and V from `row` on, for a tile.
struct Position {
  int64_t tile, row;

  POSEIDON_DEVICE bool IsInside(const Factors& f) const { return tile < f.end_tile && row < f.k; }

  template <typename Machine>
  POSEIDON_DEVICE void Advance(const Machine& machine, const Factors& f, int rows) {
    row += rows;
    if (row >= f.k) {
      tile += machine.tile_step();
      row = 0;
    }
  }
};

// Feeds bring rows of U and V to the stages of shared memory, ahead of their use and over the ends
// of tiles: what the next tile needs comes while this one's result is written. A stage has a panel
// of U and one of V. In this feed all threads copy.
template <typename T>
class ThreadFeed {
 public:
  using Panel = PaddedPanel<T>;
  // More bytes are under way than the second-level cache delivers within its latency.
  static constexpr int kStages = 3;
  static constexpr int kSharedBytes = kStages * 2 * Panel::kBytes;

  template <typename Machine>
  explicit POSEIDON_DEVICE ThreadFeed(Machine& machine) : next_{machine.first_tile(), 0} {}

  // Starts to copy what comes next. At the end, there is nothing to copy, but still something to
  // wait for, so that waiting can count.
  template <typename Machine>
  POSEIDON_DEVICE void Fill(Machine& machine, const Factors& f, int stage) {
    if (next_.IsInside(f)) {
      if (next_.row == 0) {
        const Tile corner = Tile::At(next_.tile, f.m(), f.n());
        u_.Begin(machine, f.u, corner.row);
        v_.Begin(machine, f.v, corner.column);
      }
      const int rows = AtMost(Panel::kDepth, f.k - next_.row);
      const int panel = stage * 2 * Panel::kBytes;
      u_.Copy(machine, f.u, rows, panel);
      v_.Copy(machine, f.v, rows, panel + Panel::kBytes);
      next_.Advance(machine, f, Panel::kDepth);
    }
    machine.CommitCopies();
  }

  // Returns when the block's copies to the stage that was filled first are there, and all threads have
  // come here.
  template <typename Machine>
  POSEIDON_DEVICE void Wait(Machine& machine, int) {
    machine.template WaitForCopies<kStages - 2>();
    machine.Barrier();
  }

 private:
  // What a thread copies of the columns of U or V that a tile needs. It holds what comes next, so
  // that little is left to compute when a stage is filled.
  class Source {
   public:
    // Moves to the first row, at `column`.
    template <typename Machine>
    POSEIDON_DEVICE void Begin(Machine& machine, const Factor& factor, int64_t column) {
      WithPieces(factor, [&](auto pieces) {
        using Pieces = decltype(pieces);
        const unsigned thread = machine.thread();
        const int row = static_cast<int>(thread / Pieces::kOfRow);
        const int c = static_cast<int>(thread % Pieces::kOfRow) * Pieces::kSize;
        next_ = factor.data + (row * factor.columns + column + c) * int64_t{sizeof(T)};
        to_ = Panel::At(row, c);
        // Where there is nothing to copy, the row is none of the panel's.
        row_ = c < AtMost(kTile, factor.columns - column) ? row : Panel::kDepth;
      });
    }

    // Copies the next rows to a panel. The rest of it becomes zeros, which add nothing.
    template <typename Machine>
    POSEIDON_DEVICE void Copy(Machine& machine, const Factor& factor, int rows, int panel) {
      WithPieces(factor, [&](auto pieces) {
        using Pieces = decltype(pieces);
        const int64_t step = Pieces::kRowsAtOnce * factor.columns * int64_t{sizeof(T)};
        const int to = panel + to_;
#pragma unroll(4)
        for (int r = 0; r < Panel::kDepth; r += Pieces::kRowsAtOnce) {
          machine.template Copy<Pieces::kBytes>(to + r * Panel::kPitch, next_, row_ + r < rows);
          next_ += step;
        }
      });
    }

   private:
    template <int kPieceBytes>
    struct Pieces {
      static constexpr int kBytes = kPieceBytes;
      static constexpr int kSize = kBytes / sizeof(T);
      static constexpr int kOfRow = kTile / kSize;
      static constexpr int kRowsAtOnce = kThreads / kOfRow;
    };

    // Calls a function with the largest Pieces that the alignment of the rows allows.
    template <typename Function>
    static POSEIDON_DEVICE void WithPieces(const Factor& factor, const Function& function) {
      switch (factor.copy_bytes) {
        case 16:
          return function(Pieces<16>());
        case 4:
          return function(Pieces<4>());
        default:
          return function(Pieces<sizeof(T)>());
      }
    }

    const char* next_;
    int row_, to_;  // the thread's first row of a panel, and where that lies in it
  };

  Position next_;
  Source u_, v_;
};

// In this feed, one thread tells the copy engine to copy: boxes of 64 rows and columns, with zeros
// where the factor ends. All threads count along: where their paths differ by more than the
// instructions to the engine, the compiler has each `wgmma` wait for the last.
template <typename T>
class EngineFeed {
 public:
  using Panel = SwizzledPanel<T>;
  static constexpr int kStages = 3;
  static constexpr int kSharedBytes = kStages * (2 * Panel::kBytes + 8);

  template <typename Machine>
  explicit POSEIDON_DEVICE EngineFeed(Machine& machine) : next_{machine.first_tile(), 0} {
    if (machine.thread() == 0) {
      for (int stage = 0; stage < kStages; ++stage) machine.BeginBoxes(BarrierOf(stage));
    }
    machine.Barrier();
  }

  template <typename Machine>
  POSEIDON_DEVICE void Fill(Machine& machine, const Factors& f, int stage) {
    if (!next_.IsInside(f)) return;
    if (next_.row == 0) corner_ = Tile::At(next_.tile, f.m(), f.n());
    if (machine.thread() == 0) {
      machine.ExpectBoxes(BarrierOf(stage), 2 * Panel::kBytes);
      const int panel = stage * 2 * Panel::kBytes;
      const auto row = static_cast<int>(next_.row);
      for (int box = 0; box < 2; ++box) {
        machine.CopyBox(f.u, 0, f.k, row, static_cast<int>(corner_.row) + 64 * box, panel + box * Panel::kBoxBytes,
                        BarrierOf(stage));
        machine.CopyBox(f.v, 1, f.k, row, static_cast<int>(corner_.column) + 64 * box,
                        panel + Panel::kBytes + box * Panel::kBoxBytes, BarrierOf(stage));
      }
    }
    next_.Advance(machine, f, Panel::kDepth);
  }

  template <typename Machine>
  POSEIDON_DEVICE void Wait(Machine& machine, int stage) {
    machine.WaitForBoxes(BarrierOf(stage), phases_ >> stage & 1);
    phases_ ^= 1u << stage;
    machine.Barrier();
  }

 private:
  // Where the barrier of a stage lies: it counts the bytes that have come.
  static constexpr POSEIDON_DEVICE int BarrierOf(int stage) { return kStages * 2 * Panel::kBytes + 8 * stage; }

  Position next_;
  Tile corner_;          // of that tile
  unsigned phases_ = 0;  // a bit for each stage: whether it is filled for the second, fourth, ... time
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

// Products by `mma.sync`: of Bfloat16, Float16 or Tf32.
template <typename T, int kVector>
struct TensorCores {
  using Panel = PaddedPanel<T>;
  using Lane = WarpLane<kVector>;
  using Feed = ThreadFeed<T>;
  static constexpr int kRunSize = kVector;
  static constexpr int kRowsAtOnce = 32 / sizeof(T);
  static constexpr bool kIsForHopper = false;

  template <typename Machine>
  static POSEIDON_DEVICE void Begin(Machine&, int, int, int, Sums&) {}

  // Adds the products of the first rows of two panels.
  template <typename Machine>
  static POSEIDON_DEVICE void End(Machine& machine, const Lane& lane, int u, int v, int rows, Sums& sums) {
    const auto multiply = [&](int r) {
      Fragments fragments_u, fragments_v;
      Load(machine, lane, u + Panel::At(r, lane.row), fragments_u);
      Load(machine, lane, v + Panel::At(r, lane.column), fragments_v);
      machine.template MultiplyAdd<T>(fragments_u, fragments_v, sums);
    };
    if (rows == Panel::kDepth) {
#pragma unroll
      for (int r = 0; r < Panel::kDepth; r += kRowsAtOnce) multiply(r);
    } else {
#pragma unroll(1)
      for (int r = 0; r < rows; r += kRowsAtOnce) multiply(r);
    }
  }

  template <bool kAreRounded, typename Machine>
  static POSEIDON_DEVICE void Settle(Machine&, const Lane&, Sums&) {}

 private:
  template <typename Machine>
  static POSEIDON_DEVICE void Load(Machine& machine, const Lane& lane, int shared, Fragments& fragments) {
    constexpr int pitch = Panel::kPitch;
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

// Products by `wgmma`, which reads U and V where they lie in shared memory and leaves the threads
// free to copy: of Bfloat16 or Float16.
template <typename T, int kVector>
struct WarpgroupTensorCores {
  using Panel = SwizzledPanel<T>;
  using Lane = WarpgroupLane<kVector>;
  using Feed = EngineFeed<T>;
  static constexpr int kRunSize = kVector;
  static constexpr int kRowsAtOnce = 16;
  static constexpr bool kIsForHopper = true;

  template <typename Machine>
  static POSEIDON_DEVICE void Begin(Machine& machine, int u, int v, int rows, Sums& sums) {
    const auto multiply = [&](int r) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        machine.template WarpgroupMultiplyAdd<T>(u + m * Panel::kBoxBytes + r * Panel::kPitch, v + r * Panel::kPitch,
                                                 Panel::kBoxBytes, sums, m);
      }
    };
    machine.BeginProducts(sums);
    if (rows > Panel::kDepth - kRowsAtOnce) {
#pragma unroll
      for (int r = 0; r < Panel::kDepth; r += kRowsAtOnce) multiply(r);
    } else {
#pragma unroll(1)
      for (int r = 0; r < rows; r += kRowsAtOnce) multiply(r);
    }
    machine.CommitProducts();
  }

  template <typename Machine>
  static POSEIDON_DEVICE void End(Machine& machine, const Lane&, int, int, int, Sums& sums) {
    machine.WaitForProducts(sums);
  }

  template <bool kAreRounded, typename Machine>
  static POSEIDON_DEVICE void Settle(Machine& machine, const Lane& lane, Sums& sums) {
    lane.template Settle<kAreRounded>(machine, sums);
  }
};

// Products of float32 without tensor cores. A thread has the same elements as with `mma.sync`.
struct PlainFloats {
  using Panel = PaddedPanel<float>;
  using Lane = WarpLane<4>;
  using Feed = ThreadFeed<float>;
  static constexpr int kRunSize = 4;
  static constexpr bool kIsForHopper = false;

  template <typename Machine>
  static POSEIDON_DEVICE void Begin(Machine&, int, int, int, Sums&) {}

  template <typename Machine>
  static POSEIDON_DEVICE void End(Machine& machine, const Lane& lane, int u, int v, int rows, Sums& sums) {
#pragma unroll(8)
    for (int r = 0; r < rows; ++r) Multiply(machine, lane, u + Panel::At(r, 0), v + Panel::At(r, 0), sums);
  }

  template <bool kAreRounded, typename Machine>
  static POSEIDON_DEVICE void Settle(Machine&, const Lane&, Sums&) {}

 private:
  template <typename Machine>
  static POSEIDON_DEVICE void Multiply(Machine& machine, const Lane& lane, int u, int v, Sums& sums) {
    using Floats = Vector<float, 16>;
    Floats rows[2], runs[4];
    for (int i = 0; i < 2; ++i) {
      rows[i] = machine.template LoadShared<Floats>(u + Panel::At(0, lane.row + lane.Brings(i)));
    }
    for (int i = 0; i < 4; ++i) {
      runs[i] = machine.template LoadShared<Floats>(v + Panel::At(0, lane.Column(i)));
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
    for (int j = 0; j < run.kSize; ++j) run.elements[j] = j < count ? machine.Read(from + j) : T{};
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

// out = alpha * products, and + beta * out if that is read.
template <typename Out, bool kReadsOut>
struct Combine {
  static constexpr int kRunSize = 16 / sizeof(Out);
  static constexpr int kRunsAtOnce = 32 / kRunSize;
  // Whether pairs of sums can be rounded before they are exchanged, which halves what is exchanged.
  static constexpr bool kRoundsPairs = sizeof(Out) == 2 && !kReadsOut;
  using Run = Vector<Out, 16>;
  struct Old {
    Run out;
  };

  float alpha, beta;
  Out* out;
  bool is_aligned;  // every row begins at a multiple of 16 bytes

  template <bool kIsAligned, typename Machine>
  POSEIDON_DEVICE void Read(Machine& machine, int64_t at, int count, Old& old) const {
    if constexpr (kReadsOut) ReadRun<kIsAligned>(machine, out + at, count, old.out);
  }

  template <bool kIsAligned, typename Machine>
  POSEIDON_DEVICE void Write(Machine& machine, int64_t at, int count, const float* products, const Old& old) const {
    Run run;
    for (int j = 0; j < kRunSize; ++j) {
      float sum = alpha * products[j];
      if constexpr (kReadsOut) sum += beta * machine.ToFloat(old.out.elements[j]);
      machine.Round(sum, run.elements[j]);
    }
    WriteRun<kIsAligned>(machine, out + at, count, run);
  }

  // Rounds pairs of sums, each to the first float of the pair.
  template <typename Machine>
  POSEIDON_DEVICE void RoundPairs(Machine& machine, Sums& sums) const {
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 8; ++j) {
        for (int x = 0; x < 4; x += 2) {
          Pair pair;
          for (int y = 0; y < 2; ++y) machine.Round(alpha * sums[i][j][x + y], pair.elements.elements[y]);
          sums[i][j][x] = pair.bits;
        }
      }
    }
  }

  // As Write, of pairs that are rounded.
  template <bool kIsAligned, typename Machine>
  POSEIDON_DEVICE void WriteRounded(Machine& machine, int64_t at, int count, const float* pairs) const {
    Run run;
    for (int j = 0; j < kRunSize; ++j) run.elements[j] = Pair{pairs[j & ~1]}.elements.elements[j % 2];
    WriteRun<kIsAligned>(machine, out + at, count, run);
  }

 private:
  union Pair {
    float bits;
    Vector<Out, 2 * sizeof(Out)> elements;
  };
};

// A step of gradient descent, see poseidon_outer_product_update.
template <bool kHasVelocity>
struct Descend {
  static constexpr int kRunSize = 4;
  static constexpr int kRunsAtOnce = kHasVelocity ? 4 : 8;
  static constexpr bool kRoundsPairs = false;
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

// The program of a block, with `Product` one of TensorCores, WarpgroupTensorCores and PlainFloats, and
// `Epilogue` of Combine and Descend. A Product adds the products of the first rows of two panels, at
// `u` and `v`: from Begin to End, these and the sums are its own.
template <typename Product, typename Epilogue>
class Program {
 public:
  using Panel = typename Product::Panel;
  using Feed = typename Product::Feed;
  static constexpr int kSharedBytes = Feed::kSharedBytes;
  static constexpr bool kIsForHopper = Product::kIsForHopper;
  static constexpr bool kRoundsPairs = kIsForHopper && Epilogue::kRoundsPairs;

  struct Arguments {
    Factors factors;
    Epilogue epilogue;
  };

  // Computes every machine.tile_step()-th tile from machine.first_tile() on.
  template <typename Machine>
  static POSEIDON_DEVICE void Run(Machine& machine, const Arguments& a) {
    const Factors& f = a.factors;
    Feed feed(machine);
    for (int stage = 0; stage < Feed::kStages - 1; ++stage) feed.Fill(machine, f, stage);
    int stage = 0;
    for (int64_t tile = machine.first_tile(); tile < f.end_tile; tile += machine.tile_step()) {
      const typename Product::Lane lane(machine.thread());
      Sums sums = {};
      for (int64_t row = 0; row < f.k; row += Panel::kDepth) {
        // When all threads have come here, nobody reads the stage before this one any more.
        feed.Wait(machine, stage);
        const int u = stage * 2 * Panel::kBytes, v = u + Panel::kBytes;
        const int rows = AtMost(Panel::kDepth, f.k - row);
        Product::Begin(machine, u, v, rows, sums);
        feed.Fill(machine, f, stage == 0 ? Feed::kStages - 1 : stage - 1);
        Product::End(machine, lane, u, v, rows, sums);
        stage = stage == Feed::kStages - 1 ? 0 : stage + 1;
      }
      if constexpr (kRoundsPairs) a.epilogue.RoundPairs(machine, sums);
      Product::template Settle<kRoundsPairs>(machine, lane, sums);
      const Tile corner = Tile::At(tile, f.m(), f.n());
      if (a.epilogue.is_aligned) {
        Finish<true>(machine, a, corner, lane, sums);
      } else {
        Finish<false>(machine, a, corner, lane, sums);
      }
    }
  }

 private:
  // Hands what a thread has computed to the epilogue, some runs at a time: all that these need is
  // read before any of it is written, so that the reads overlap.
  template <bool kIsAligned, typename Machine>
  static POSEIDON_DEVICE void Finish(Machine& machine, const Arguments& a, const Tile& tile,
                                     const typename Product::Lane& lane, const Sums& sums) {
    constexpr int kRunSize = Product::kRunSize;
    constexpr int kRunsOfRow = Product::Lane::kRunsOfRow;
    constexpr int kRuns = kTile * kTile / kThreads / kRunSize;
    static_assert(kRunSize == Epilogue::kRunSize, "a lane's sums make whole vectors of the result");
    constexpr int kBatch = kIsAligned ? Epilogue::kRunsAtOnce : 1;
    // How much of the tile is there. All else fits into 32 bits.
    const int64_t n = a.factors.n();
    const int rows = AtMost(kTile, a.factors.m() - tile.row), columns = AtMost(kTile, n - tile.column);
#pragma unroll
    for (int first = 0; first < kRuns; first += kBatch) {
      typename Epilogue::Old old[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int r = lane.Row((first + i) / kRunsOfRow), c = lane.Column((first + i) % kRunsOfRow);
        a.epilogue.template Read<kIsAligned>(machine, (tile.row + r) * n + tile.column + c, r < rows ? columns - c : 0,
                                             old[i]);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int x = (first + i) / kRunsOfRow, run = (first + i) % kRunsOfRow;
        const int r = lane.Row(x), c = lane.Column(run), count = r < rows ? columns - c : 0;
        const int64_t at = (tile.row + r) * n + tile.column + c;
        float products[kRunSize];
        for (int j = 0; j < kRunSize; ++j) products[j] = lane.Sum(sums, x, run, j);
        if constexpr (kRoundsPairs) {
          a.epilogue.template WriteRounded<kIsAligned>(machine, at, count, products);
        } else {
          a.epilogue.template Write<kIsAligned>(machine, at, count, products, old[i]);
        }
      }
    }
  }
};

}  // namespace poseidon

#endif  // POSEIDON_CUDA_BLOCK_H_
