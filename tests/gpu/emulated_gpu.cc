// A GPU emulated on the CPU, to test the programs of kernels/cuda/block.h without a GPU. It has the interface of
// kernels/cuda/outer_product.h, on host memory, and is as adverse as a GPU may be:
//   - Threads run in an order that a seed determines, each until it waits for others.
//   - Asynchronous copies complete at once, or only when they are waited for.
//   - Shared memory is initially NaN.
//   - Accesses that are out of bounds, unaligned or have bank conflicts fail.
//   - `wgmma` reads shared memory when it begins, or only when it is waited for.
// Blocks run one after another, and the emulation does not model time.

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../../kernels/cuda/block.h"
#include "../../kernels/cuda/dispatch.h"

namespace poseidon {
namespace {

constexpr int kLanes = 32;
constexpr int kWarps = kThreads / kLanes;
constexpr int kFault = 700;  // cudaErrorIllegalAddress

// The settings of the next calls, see poseidon_emulate.
struct {
  int64_t first_tile = 0, tiles = INT64_MAX, blocks = 1;
  uint64_t seed = 0;
  bool has_warpgroups = false;
} settings;

std::string fault;  // of the last call

struct Memory {
  const void* data;
  int64_t bytes;
  bool is_written;
};

// Decodes the registers of the tensor cores, as in the PTX manual's tables for mma.m16n8k16 and m16n8k8.
template <typename T>
struct Registers {  // 16 bits: two elements
  static constexpr int kPerRegister = 2;
  static constexpr int K(int lane, int high, int i) { return lane % 4 * 2 + i + 8 * high; }
  static float Element(uint32_t bits, int i) { return Arithmetic<T>::Load(T{static_cast<uint16_t>(bits >> (16 * i))}); }
};

template <>
struct Registers<Tf32> {
  static constexpr int kPerRegister = 1;
  static constexpr int K(int lane, int high, int) { return lane % 4 + 4 * high; }
  static float Element(uint32_t bits, int) { return BitCast<float>(bits & ~0x1fffu); }
};

// A swizzle of 128 bytes: the bits of an address that number the row are XORed into those that number the piece of 16
// bytes.
int Swizzle(int at) { return at ^ (at >> 3 & 0x70); }

class Block {
 public:
  // The machine that a thread sees, as block.h requires it.
  class Thread;

  Block(int shared_bytes, const std::vector<Memory>& memory, int64_t first_tile, uint64_t seed)
      : memory_(memory), first_tile_(first_tile), random_(seed), shared_(shared_bytes, '\xff') {}

  void Run(const std::function<void(Thread&)>& program);

 private:
  enum class State { kReady, kAtWarp, kAtBarrier, kDone };

  struct Copy {
    int to;
    const char* from;
    int bytes;
    bool is_inside;
  };

  struct Access {
    int at, bytes;
  };

  // Copies of boxes of 64 rows and columns of 16-bit elements, and the barrier that counts their bytes.
  struct Box {
    Factor factor;
    int64_t k;
    int row, column, at;
  };
  struct Boxes {
    std::vector<Box> under_way;
    int missing = 0;  // bytes
    unsigned phase = 0;
  };

  // An instruction of `wgmma`, as a thread of it sees it.
  struct Products {
    int u, v, stride;
    float (*sums)[8][4];  // [2]: of 16 blocks of 8 columns
  };

  // Records the first fault, and stops the running thread and thereby the block.
  void Fail(const std::string& text) {
    if (fault.empty()) fault = text;
    Leave(State::kDone);
  }

  // Switches to other threads until this one is ready again.
  void Leave(State state);
  void Schedule();
  void Barrier();
  void Land(const Copy& copy);
  void Land(Boxes& boxes);
  void CheckBanks(int warp);
  template <typename T>
  void MultiplyAdd(int warp);
  template <typename T>
  void MultiplyAddAsWarpgroup(int warp, int instruction);
  template <typename T>
  float LoadSwizzled(int at, int stride, int row, int column);
  void Exchange(int warp);
  bool IsWarp(int warp, State state) const;
  void CheckMemory(const void* data, int bytes, bool is_written);

  static void Enter();
  static Block* running_;

  const std::vector<Memory>& memory_;
  const int64_t first_tile_;
  std::mt19937_64 random_;
  // The allocator's alignment to 16 bytes suffices for vectors.
  std::vector<char> shared_;
  std::map<int, Boxes> boxes_;  // by the address of their barrier
  std::vector<Thread> threads_;
  const std::function<void(Thread&)>* program_ = nullptr;
  ucontext_t scheduler_;
  int current_ = 0;
};

Block* Block::running_ = nullptr;

class Block::Thread {
 public:
  Thread(Block& block, int index) : block_(block), index_(index) {}

  unsigned thread() const { return index_; }
  int64_t first_tile() const { return block_.first_tile_; }
  int64_t tile_step() const { return settings.blocks; }
  void Barrier() { block_.Barrier(); }

  template <typename V>
  V LoadShared(int at) {
    CheckShared(at, sizeof(V));
    accesses_.push_back({at, sizeof(V)});
    V value;
    std::memcpy(&value, block_.shared_.data() + at, sizeof(V));
    return value;
  }

  template <int kBytes>
  void Copy(int at, const char* from, bool is_inside) {
    CheckShared(at, kBytes);
    if (is_inside) block_.CheckMemory(from, kBytes, false);
    const Block::Copy copy = {at, from, kBytes, is_inside};
    if (kBytes == 2 || block_.random_() % 2 == 0) {
      block_.Land(copy);
    } else {
      open_.push_back(copy);
    }
  }
  void CommitCopies() { groups_.push_back(std::move(open_)), open_.clear(); }
  template <int kPending>
  void WaitForCopies() {
    for (; groups_.size() > kPending; groups_.pop_front()) {
      for (const Block::Copy& copy : groups_.front()) block_.Land(copy);
    }
  }

  void BeginBoxes(int barrier) {
    CheckShared(barrier, 8);
    block_.boxes_[barrier] = {};
  }
  void ExpectBoxes(int barrier, int bytes) { block_.boxes_.at(barrier).missing += bytes; }
  void CopyBox(const Factor& factor, int, int64_t k, int row, int column, int at, int barrier) {
    Boxes& boxes = block_.boxes_.at(barrier);
    boxes.under_way.push_back({factor, k, row, column, at});
    if (block_.random_() % 2 == 0) block_.Land(boxes);
  }
  void WaitForBoxes(int barrier, unsigned phase) {
    Boxes& boxes = block_.boxes_.at(barrier);
    for (int tries = 0; boxes.phase == phase; ++tries) {
      if (tries == 1000000) block_.Fail("boxes never come");
      block_.Land(boxes);
      if (boxes.phase == phase) swapcontext(&context_, &block_.scheduler_);
    }
  }

  template <typename T>
  T Read(const T* from) {
    block_.CheckMemory(from, sizeof(T), false);
    return *from;
  }
  template <typename T>
  void Write(T* to, const T& value) {
    block_.CheckMemory(to, sizeof(T), true);
    *to = value;
  }

  template <typename T>
  static float ToFloat(T value) {
    return Arithmetic<T>::Load(value);
  }
  template <typename T>
  static void Round(float value, T& to) {
    to = Arithmetic<T>::Store(value);
  }
  static uint32_t LowerHalves(uint32_t x, uint32_t y) { return (x & 0xffff) | y << 16; }
  static uint32_t UpperHalves(uint32_t x, uint32_t y) { return x >> 16 | (y & 0xffff0000); }

  template <typename T>
  void MultiplyAdd(const Fragments& u, const Fragments& v, Sums& sums) {
    u_ = u, v_ = v, sums_ = &sums[0];
    const int warp = index_ / kLanes;
    state_ = State::kAtWarp;
    if (block_.IsWarp(warp, State::kAtWarp)) block_.MultiplyAdd<T>(warp);
    block_.Leave(state_);
  }

  float Exchange(float value, int mask) {
    exchanged_ = value, mask_ = mask;
    const int warp = index_ / kLanes;
    state_ = State::kAtWarp;
    if (block_.IsWarp(warp, State::kAtWarp)) block_.Exchange(warp);
    block_.Leave(state_);
    return received_;
  }

  void BeginProducts(Sums&) {
    if (are_begun_) block_.Fail("products begin before the last were waited for");
    are_begun_ = true;
  }
  template <typename T>
  void WarpgroupMultiplyAdd(int u, int v, int stride, Sums& sums, int m) {
    if (!are_begun_) block_.Fail("products are added before they begin");
    products_.push_back({u, v, stride, &sums[2 * m]});
    run_products_ = &Block::MultiplyAddAsWarpgroup<T>;
  }
  void CommitProducts() {
    // All or none of a warp's lanes, at once or when they are waited for.
    if ((settings.seed + index_ / kLanes) % 2 == 0) RunProducts();
  }
  void WaitForProducts(Sums&) {
    RunProducts();
    are_begun_ = false;
  }

 private:
  friend class Block;

  void RunProducts() {
    if (products_.empty()) return;
    const int warp = index_ / kLanes;
    state_ = State::kAtWarp;
    if (block_.IsWarp(warp, State::kAtWarp)) {
      for (size_t i = 0; i < products_.size(); ++i) (block_.*run_products_)(warp, i);
      for (int lane = 0; lane < kLanes; ++lane) block_.threads_[warp * kLanes + lane].state_ = State::kReady;
    }
    block_.Leave(state_);
    products_.clear();
  }

  void CheckShared(int at, int bytes) {
    if (at < 0 || at + bytes > static_cast<int>(block_.shared_.size()) || at % bytes != 0) {
      block_.Fail("no aligned " + std::to_string(bytes) + " bytes of shared memory at " + std::to_string(at));
    }
  }

  Block& block_;
  const int index_;
  State state_ = State::kReady;
  ucontext_t context_;
  std::vector<Access> accesses_;  // to shared memory since the warp last synchronised
  std::vector<Block::Copy> open_;
  std::deque<std::vector<Block::Copy>> groups_;
  const uint32_t (*u_)[2];
  const uint32_t (*v_)[2];
  float (*sums_)[8][4];
  std::vector<Products> products_;
  void (Block::*run_products_)(int, int) = nullptr;
  bool are_begun_ = false;
  float exchanged_, received_;
  int mask_;
};

void Block::Run(const std::function<void(Thread&)>& program) {
  constexpr size_t kStackBytes = 64 << 10;
  static const std::unique_ptr<char[]> stacks(new char[kThreads * kStackBytes]);
  program_ = &program;
  running_ = this;
  threads_.reserve(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    ucontext_t& context = threads_.emplace_back(*this, i).context_;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks.get() + i * kStackBytes;
    context.uc_stack.ss_size = kStackBytes;
    makecontext(&context, Enter, 0);
  }
  Schedule();
}

void Block::Enter() {
  Thread& thread = running_->threads_[running_->current_];
  (*running_->program_)(thread);
  for (const auto& group : thread.groups_) {
    if (!group.empty()) running_->Fail("a block ends with copies under way");
  }
  for (const auto& [barrier, boxes] : running_->boxes_) {
    if (!boxes.under_way.empty() || boxes.missing) running_->Fail("a block ends with boxes under way");
  }
  running_->Leave(State::kDone);
}

void Block::Leave(State state) {
  Thread& thread = threads_[current_];
  thread.state_ = state;
  if (state != State::kReady) swapcontext(&thread.context_, &scheduler_);
}

void Block::Schedule() {
  int warp = 0;
  while (fault.empty()) {
    // A warp may get far ahead of the others.
    std::vector<int> ready;
    for (const Thread& t : threads_) {
      if (t.state_ == State::kReady) ready.push_back(t.index_);
    }
    if (ready.empty()) break;
    const bool can_go_on = std::any_of(ready.begin(), ready.end(), [&](int thread) { return thread / kLanes == warp; });
    if (!can_go_on || random_() % 4 == 0) warp = ready[random_() % ready.size()] / kLanes;
    const int first = random_() % kLanes;
    for (int i = 0; i < kLanes && fault.empty(); ++i) {
      current_ = warp * kLanes + (first + i) % kLanes;
      Thread& thread = threads_[current_];
      if (thread.state_ == State::kReady) swapcontext(&scheduler_, &thread.context_);
    }
  }
  if (!fault.empty()) return;
  for (const Thread& t : threads_) {
    if (t.state_ != State::kDone) fault = "threads wait for others that have ended";
  }
}

void Block::Barrier() {
  threads_[current_].state_ = State::kAtBarrier;
  for (int warp = 0; warp < kWarps; ++warp) {
    if (!IsWarp(warp, State::kAtBarrier)) return Leave(State::kAtBarrier);
  }
  for (int warp = 0; warp < kWarps; ++warp) CheckBanks(warp);
  for (Thread& t : threads_) t.state_ = State::kReady;
}

bool Block::IsWarp(int warp, State state) const {
  const auto begin = threads_.begin() + warp * kLanes;
  return std::all_of(begin, begin + kLanes, [=](const Thread& t) { return t.state_ == state; });
}

void Block::Land(const Copy& copy) {
  char* to = shared_.data() + copy.to;
  if (copy.is_inside) {
    std::memcpy(to, copy.from, copy.bytes);
  } else {
    std::memset(to, 0, copy.bytes);
  }
}

void Block::Land(Boxes& boxes) {
  for (const Box& box : boxes.under_way) {
    const auto* data = reinterpret_cast<const uint16_t*>(box.factor.data);
    if (box.at % 1024 != 0 || box.at < 0 || box.at + 64 * 128 > static_cast<int>(shared_.size())) {
      return Fail("a box at " + std::to_string(box.at));
    }
    for (int row = 0; row < 64; ++row) {
      for (int column = 0; column < 64; ++column) {
        const int64_t r = box.row + row, c = box.column + column;
        const bool is_inside = r < box.k && c < box.factor.columns;
        const uint16_t* element = data + r * box.factor.columns + c;
        if (is_inside) CheckMemory(element, 2, false);
        const uint16_t value = is_inside ? *element : 0;
        std::memcpy(&shared_[Swizzle(box.at + row * 128 + column * 2)], &value, 2);
      }
    }
    boxes.missing -= 64 * 128;
  }
  if (!boxes.under_way.empty() && boxes.missing == 0) boxes.phase ^= 1;
  boxes.under_way.clear();
}

void Block::CheckMemory(const void* data, int bytes, bool is_written) {
  const auto at = reinterpret_cast<uintptr_t>(data);
  for (const Memory& m : memory_) {
    const auto begin = reinterpret_cast<uintptr_t>(m.data);
    if (at >= begin && at + bytes <= begin + m.bytes && (m.is_written || !is_written) && at % bytes == 0) {
      return;
    }
  }
  Fail("an access outside of the factors and results, or not aligned");
}

// Neighbouring lanes read 128 bytes at a time: one word from each of the 32 banks, which several lanes may share.
void Block::CheckBanks(int warp) {
  Thread* lanes = &threads_[warp * kLanes];
  for (size_t i = 0; i < lanes[0].accesses_.size(); ++i) {
    int word_of_bank[32];
    for (int lane = 0; lane < kLanes; ++lane) {
      if (lanes[lane].accesses_.size() != lanes[0].accesses_.size()) return Fail("a warp diverges");
      const Access access = lanes[lane].accesses_[i];
      if (lane * access.bytes % 128 == 0) std::fill_n(word_of_bank, 32, -1);
      for (int word = access.at / 4; word < (access.at + access.bytes) / 4; ++word) {
        int& other = word_of_bank[word % 32];
        if (other >= 0 && other != word) return Fail("lanes read different words of one bank");
        other = word;
      }
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane].accesses_.clear();
}

template <typename T>
void Block::MultiplyAdd(int warp) {
  CheckBanks(warp);
  constexpr int kDepth = 8 * Registers<T>::kPerRegister;
  static float u[kDepth][64], v[kDepth][64];  // columns in the order of the instructions
  Thread* lanes = &threads_[warp * kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int high = 0; high < 2; ++high) {
      for (int i = 0; i < Registers<T>::kPerRegister; ++i) {
        const int k = Registers<T>::K(lane, high, i);
        for (int x = 0; x < 8; ++x) {
          u[k][8 * x + lane / 4] = Registers<T>::Element(lanes[lane].u_[x][high], i);
          v[k][8 * x + lane / 4] = Registers<T>::Element(lanes[lane].v_[x][high], i);
        }
      }
    }
  }
  for (int row = 0; row < 64; ++row) {
    float sums[64] = {};
    for (int k = 0; k < kDepth; ++k) {
      for (int column = 0; column < 64; ++column) sums[column] += u[k][row] * v[k][column];
    }
    for (int column = 0; column < 64; ++column) {
      const int lane = row % 8 * 4 + column % 8 / 2;
      lanes[lane].sums_[row / 16][column / 8][row % 16 / 8 * 2 + column % 2] += sums[column];
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane].state_ = State::kReady;
}

// An element of a SwizzledPanel, as a matrix descriptor finds it.
template <typename T>
float Block::LoadSwizzled(int at, int stride, int row, int column) {
  const int plain = at + column / 64 * stride + row / 8 * 1024 + row % 8 * 128 + column % 64 * 2;
  const int swizzled = Swizzle(plain);
  if (at % 1024 != 0 || swizzled < 0 || swizzled + 2 > static_cast<int>(shared_.size())) {
    Fail("a matrix descriptor of " + std::to_string(at) + " and " + std::to_string(stride));
  }
  T value;
  std::memcpy(&value, shared_.data() + swizzled, sizeof(T));
  return Arithmetic<T>::Load(value);
}

// The share of a warp: 16 of 64 rows, see the figures for wgmma.m64nNk16 in the PTX manual.
template <typename T>
void Block::MultiplyAddAsWarpgroup(int warp, int instruction) {
  Thread* lanes = &threads_[warp * kLanes];
  const Products& first = lanes[0].products_[instruction];
  for (int lane = 1; lane < kLanes; ++lane) {
    if (lanes[lane].products_.size() != lanes[0].products_.size()) return Fail("a warp diverges");
    const Products& other = lanes[lane].products_[instruction];
    if (other.u != first.u || other.v != first.v || other.stride != first.stride) return Fail("a warp diverges");
  }
  static float u[16][16], v[16][128];
  for (int k = 0; k < 16; ++k) {
    for (int row = 0; row < 16; ++row) u[k][row] = LoadSwizzled<T>(first.u, first.stride, k, warp % 4 * 16 + row);
    for (int column = 0; column < 128; ++column) v[k][column] = LoadSwizzled<T>(first.v, first.stride, k, column);
  }
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 128; ++column) {
      float sum = 0;
      for (int k = 0; k < 16; ++k) sum += u[k][row] * v[k][column];
      const Products& products = lanes[row % 8 * 4 + column % 8 / 2].products_[instruction];
      products.sums[column / 64][column % 64 / 8][row / 8 * 2 + column % 2] += sum;
    }
  }
}

void Block::Exchange(int warp) {
  Thread* lanes = &threads_[warp * kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes[lane].received_ = lanes[lane ^ lanes[lane].mask_].exchanged_;
    lanes[lane].state_ = State::kReady;
  }
}

struct Launcher {
  std::vector<Memory> memory;

  static bool HasWarpgroups() { return settings.has_warpgroups; }

  template <typename ThisProgram>
  int Run(typename ThisProgram::Arguments arguments) {
    fault.clear();
    const int64_t tiles = std::min(arguments.factors.end_tile - settings.first_tile, settings.tiles);
    arguments.factors.end_tile = settings.first_tile + tiles;
    for (int64_t i = 0; i < std::min(tiles, settings.blocks) && fault.empty(); ++i) {
      Block block(ThisProgram::kSharedBytes, memory, settings.first_tile + i, settings.seed + i);
      block.Run([&](Block::Thread& thread) { ThisProgram::Run(thread, arguments); });
    }
    return fault.empty() ? kSuccess : kFault;
  }
};

Launcher MakeLauncher(const PoseidonFactors* f) {
  if (!f) return {};
  const int64_t bytes = f->type == POSEIDON_BFLOAT16 || f->type == POSEIDON_HALF ? 2 : 4;
  return {{{f->u, f->k * f->m * bytes, false}, {f->v, f->k * f->n * bytes, false}}};
}

}  // namespace
}  // namespace poseidon

// Makes the next calls run `tiles` tiles, starting with `first_tile`, on `blocks` blocks, in the order of `seed`.
extern "C" void poseidon_emulate(int64_t first_tile, int64_t tiles, int64_t blocks, uint64_t seed) {
  poseidon::settings = {first_tile, tiles, blocks, seed, poseidon::settings.has_warpgroups};
}

// Makes the next calls run on Hopper, which has `wgmma`, or on a GPU that has not.
extern "C" void poseidon_emulate_hopper(bool is_hopper) { poseidon::settings.has_warpgroups = is_hopper; }

// Returns the first row and column of a tile of a result [m, n] in `corner`.
extern "C" void poseidon_emulated_tile(int64_t number, int64_t m, int64_t n, int64_t* corner) {
  const poseidon::Tile tile = poseidon::Tile::At(number, m, n);
  corner[0] = tile.row, corner[1] = tile.column;
}

int poseidon_outer_product(CUstream_st*, const PoseidonFactors* factors, float alpha, float beta, void* out,
                           PoseidonType out_type) {
  auto launcher = poseidon::MakeLauncher(factors);
  const int64_t bytes = out_type == POSEIDON_FLOAT32 ? 4 : 2;
  if (factors) launcher.memory.push_back({out, factors->m * factors->n * bytes, true});
  return poseidon::OuterProduct(launcher, factors, alpha, beta, out, out_type);
}

int poseidon_outer_product_update(CUstream_st*, const PoseidonFactors* factors, float learning_rate, float momentum,
                                  bool nesterov, float* velocity, float* weights) {
  auto launcher = poseidon::MakeLauncher(factors);
  if (factors) {
    for (float* result : {velocity, weights}) {
      launcher.memory.push_back({result, factors->m * factors->n * 4, true});
    }
  }
  return poseidon::Update(launcher, factors, learning_rate, momentum, nesterov, velocity, weights);
}

const char* poseidon_cuda_error(int error) {
  return error == poseidon::kFault ? poseidon::fault.c_str() : "the arguments do not go together";
}
