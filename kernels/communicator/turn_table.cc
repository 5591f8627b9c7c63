// The table of an accelerator: a file in memory, with a lock for each process that is in it.
//
// Tests: tests/native/turn_table_test.cc, tests/training/test_crossover.py.

#include "turn_table.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "json.h"
#include "text.h"

namespace poseidon {
namespace {

constexpr uint64_t kMagic = 0x31736e7275546470;  // "pdTurns1"; another layout has another number
constexpr int kMostTakers = 64;

// Bytes of the file that are locked: for changes of who is in it, for numbers, and for each slot while its process
// lives.
constexpr off_t kEntryLock = 0, kNumberLock = 1, kFirstSlotLock = 16;

int64_t NowNanoseconds() {
  timespec now;
  clock_gettime(CLOCK_BOOTTIME, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

struct flock LockOf(off_t byte, int16_t type) {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  return lock;
}

// Locks are those of the open file, not of the process, which would lose them when it closes the file for any other
// reason, as after Describe.
bool TryLock(int file, off_t byte) {
  struct flock lock = LockOf(byte, F_WRLCK);
  return fcntl(file, F_OFD_SETLK, &lock) == 0;
}

void Unlock(int file, off_t byte) {
  struct flock lock = LockOf(byte, F_UNLCK);
  fcntl(file, F_OFD_SETLK, &lock);
}

// Whether another open file has the lock.
bool IsLocked(int file, off_t byte) {
  struct flock lock = LockOf(byte, F_WRLCK);
  return fcntl(file, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

// The open files of tables, which processes that this one forks must not keep: they would keep its locks.
class OpenFiles {
 public:
  static OpenFiles& Instance() {
    static auto* const files = new OpenFiles;
    return *files;
  }

  int Open(const std::string& path, int flags) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int file = open(path.c_str(), flags | O_CLOEXEC, 0600);
    if (file >= 0) files_.insert(file);
    return file;
  }

  void Close(int file) {
    std::lock_guard<std::mutex> lock(mutex_);
    files_.erase(file);
    close(file);
  }

 private:
  OpenFiles() {
    pthread_atfork([] { Instance().mutex_.lock(); }, [] { Instance().mutex_.unlock(); },
                   [] {
                     for (int file : Instance().files_) close(file);
                     Instance().files_.clear();
                     Instance().mutex_.unlock();
                   });
  }

  std::mutex mutex_;
  std::set<int> files_;
};

// Holds a lock, if it can be had within some seconds: who has it needs it for microseconds, unless it was stopped.
class Locked {
 public:
  Locked(int file, off_t byte, double seconds) : file_(file), byte_(byte) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (!(has_ = TryLock(file, byte)) && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  ~Locked() {
    if (has_) Unlock(file_, byte_);
  }

  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

  bool has() const { return has_; }

 private:
  const int file_;
  const off_t byte_;
  bool has_ = false;
};

template <size_t N>
void CopyText(const std::string& text, char (&to)[N]) {
  std::strncpy(to, text.c_str(), N - 1);
  to[N - 1] = '\0';
}

// The number of a job in a list; null if it is not there.
const TurnGrant::Given* Find(const TurnGrant& grant, uint64_t job) {
  for (const auto& given : grant.others) {
    if (given.job == job) return &given;
  }
  return nullptr;
}

}  // namespace

// The kernel clears new files, and zeros are how all of these begin.
struct TurnTable::Slot {
  std::atomic<uint64_t> job;  // 0: free; a process that has died leaves it as it was
  int64_t pid;
  int32_t rank;
  uint64_t accelerators;
  char program[128];
  std::atomic<uint64_t> given;   // the last number that the job took, of the rank that takes them
  std::atomic<uint64_t> passed;  // all numbers up to here are over in this process
  std::atomic<uint32_t> state;   // a TurnState, of the turn `number`
  std::atomic<uint64_t> number;
  std::atomic<int64_t> since;  // nanoseconds
};

struct TurnTable::Shared {
  uint64_t magic;
  char name[128], accelerator[256];
  std::atomic<uint32_t> changes;
  std::atomic<uint64_t> next;
  Slot slots[kMostTakers];
};

TurnTable::TurnTable(const std::string& path, const std::string& name, const std::string& accelerator,
                     const TurnTaker& taker)
    : job_(taker.job), pid_(getpid()) {
  static_assert(std::atomic<uint64_t>::is_always_lock_free, "processes share it");
  file_ = OpenFiles::Instance().Open(path, O_RDWR | O_CREAT | O_NOFOLLOW);
  if (file_ < 0) {
    throw std::runtime_error(Text("crossover='", name, "' needs the file ", path, ", which cannot be opened (",
                                  std::generic_category().message(errno), "); remove it, or mount /dev/shm."));
  }
  try {
    Enter(path, name, accelerator, taker);
  } catch (...) {
    if (shared_) munmap(shared_, sizeof(Shared));
    OpenFiles::Instance().Close(file_);
    throw;
  }
}

void TurnTable::Enter(const std::string& path, const std::string& name, const std::string& accelerator,
                      const TurnTaker& taker) {
  constexpr double kLongestEntry = 10;  // seconds
  const Locked lock(file_, kEntryLock, kLongestEntry);
  if (!lock.has()) {
    throw std::runtime_error(Text("Another process holds ", path, " of crossover='", name, "' for more than ",
                                  kLongestEntry, " s, as one does that was stopped; continue or end that."));
  }
  struct stat status;
  int failure = fstat(file_, &status) == 0 ? 0 : errno;
  // Its memory is taken now: later, there would be a signal in place of an error.
  if (failure == 0 && status.st_size == 0) failure = posix_fallocate(file_, 0, sizeof(Shared));
  if (failure != 0) {
    throw std::runtime_error(Text(path, " of crossover='", name, "' cannot have ", sizeof(Shared), " bytes (",
                                  std::generic_category().message(failure), "); make room in /dev/shm."));
  }
  if (status.st_size == 0 || status.st_size == static_cast<off_t>(sizeof(Shared))) {
    void* const memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (memory != MAP_FAILED) shared_ = static_cast<Shared*>(memory);
  }
  if (shared_ && shared_->magic == 0) {  // new, or its maker has died
    CopyText(name, shared_->name);
    CopyText(accelerator, shared_->accelerator);
    shared_->magic = kMagic;
  }
  if (!shared_ || shared_->magic != kMagic) {
    throw std::runtime_error(Text(path, " of crossover='", name,
                                  "' is no table of this version of tf_poseidon; end the "
                                  "programs of the other version, and remove the file."));
  }
  std::array<uint64_t, TurnGrant::kMostOthers> jobs = {};
  int number_of_jobs = 0;
  for (int i = 0; i < kMostTakers; ++i) {
    Slot& slot = shared_->slots[i];
    const uint64_t job = slot.job;
    if (job == 0 || !IsAlive(i)) {
      // A process that is leaving may still have the lock of a slot that is free.
      if (own_ < 0 && TryLock(file_, kFirstSlotLock + i)) own_ = i;
      continue;
    }
    if (job == job_) continue;
    if (slot.accelerators != taker.accelerators) {
      throw std::runtime_error(Text("crossover='", name, "', but process ", slot.pid, " (", slot.program,
                                    ") takes turns by this name with a job on other accelerators, expected the same "
                                    "hosts and processes on each; start both jobs alike, or give them other names."));
    }
    if (std::find(jobs.begin(), jobs.end(), job) != jobs.end()) continue;
    if (number_of_jobs == TurnGrant::kMostOthers) {
      own_ = -1;
      break;
    }
    jobs[number_of_jobs++] = job;
  }
  if (own_ < 0) {
    throw std::runtime_error(Text("crossover='", name, "' has ", number_of_jobs, " other jobs on ", accelerator,
                                  ", expected fewer; give some of them another name."));
  }
  Slot& own = shared_->slots[own_];
  own.job = 0;  // while it changes
  own.pid = pid_;
  own.rank = taker.rank;
  own.accelerators = taker.accelerators;
  CopyText(taker.program, own.program);
  own.given = own.passed = own.number = 0;
  own.state = static_cast<uint32_t>(TurnState::kIdle);
  own.since = NowNanoseconds();
  own.job = job_;
  Wake();
}

TurnTable::~TurnTable() {
  shared_->slots[own_].job = 0;
  Wake();
  munmap(shared_, sizeof(Shared));
  OpenFiles::Instance().Close(file_);  // and all locks are gone
}

bool TurnTable::IsAlive(int slot) const { return IsLocked(file_, kFirstSlotLock + slot); }

TurnGrant TurnTable::Take(double seconds) {
  const Locked lock(file_, kNumberLock, seconds);
  TurnGrant grant = {};
  grant.number = ++shared_->next;  // without the lock, too, none is given twice
  int others = 0;
  // A job whose process here has died may still have its turn elsewhere, so it is named too, behind those that live.
  for (const bool lives : {true, false}) {
    for (int i = 0; i < kMostTakers && others < TurnGrant::kMostOthers; ++i) {
      const Slot& slot = shared_->slots[i];
      const uint64_t job = slot.job, given = slot.given;
      if (job == 0 || job == job_ || given == 0 || IsAlive(i) != lives) continue;
      grant.others[others++] = {job, given};  // one of its processes takes numbers, so it is here once
    }
  }
  shared_->slots[own_].given = grant.number;
  return grant;
}

std::optional<TurnTable::Holder> TurnTable::FindHolder(const TurnGrant& grant) {
  std::optional<Holder> holder;
  uint64_t smallest = 0;
  for (int i = 0; i < kMostTakers; ++i) {
    const Slot& slot = shared_->slots[i];
    const uint64_t job = slot.job, passed = slot.passed;
    const TurnGrant::Given* const given = job == 0 || job == job_ ? nullptr : Find(grant, job);
    if (!given || passed >= given->number || (holder && given->number >= smallest)) continue;
    const auto distrusted = distrusted_.find(job);
    if ((distrusted != distrusted_.end() && passed < distrusted->second) || !IsAlive(i)) continue;
    holder = Holder{job, slot.pid, slot.rank, slot.program};
    smallest = given->number;
  }
  return holder;
}

void TurnTable::Distrust(uint64_t job, const TurnGrant& grant) {
  if (const TurnGrant::Given* const given = Find(grant, job)) distrusted_[job] = given->number;
}

void TurnTable::Show(TurnState state, uint64_t number) {
  if (getpid() != pid_) return;  // in a process that a taker has forked
  Slot& own = shared_->slots[own_];
  own.number = number;
  own.since = NowNanoseconds();
  own.state = static_cast<uint32_t>(state);
}

void TurnTable::Pass(uint64_t number) {
  if (getpid() != pid_) return;
  shared_->slots[own_].passed = number;
  Wake();
}

uint32_t TurnTable::changes() const { return shared_->changes; }

void TurnTable::Wake() {
  ++shared_->changes;
  syscall(SYS_futex, &shared_->changes, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void TurnTable::Wait(uint32_t seen, std::chrono::microseconds longest) {
  timespec timeout;
  timeout.tv_sec = longest.count() / 1000000;
  timeout.tv_nsec = longest.count() % 1000000 * 1000;
  syscall(SYS_futex, &shared_->changes, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

std::string TurnTable::Describe(const std::string& path) {
  const int file = OpenFiles::Instance().Open(path, O_RDWR);
  if (file < 0) return "";
  std::ostringstream out;
  struct stat status;
  void* memory = MAP_FAILED;
  if (fstat(file, &status) == 0 && status.st_size == static_cast<off_t>(sizeof(Shared))) {
    memory = mmap(nullptr, sizeof(Shared), PROT_READ, MAP_SHARED, file, 0);
  }
  const auto* const shared = memory == MAP_FAILED ? nullptr : static_cast<const Shared*>(memory);
  if (shared && shared->magic == kMagic) {
    out << "{\"name\": " << Quoted(shared->name) << ", \"accelerator\": " << Quoted(shared->accelerator)
        << ", \"takers\": [";
    const char* separator = "";
    for (int i = 0; i < kMostTakers; ++i) {
      const Slot& slot = shared->slots[i];
      if (slot.job == 0 || !IsLocked(file, kFirstSlotLock + i)) continue;
      constexpr const char* kStates[] = {"idle", "waiting", "holding"};
      out << separator << "{\"job\": " << slot.job << ", \"pid\": " << slot.pid << ", \"rank\": " << slot.rank
          << ", \"program\": " << Quoted(slot.program) << ", \"state\": \"" << kStates[slot.state % 3]
          << "\", \"number\": " << slot.number << ", \"seconds\": " << 1e-9 * (NowNanoseconds() - slot.since) << "}";
      separator = ", ";
    }
    out << "]}";
  }
  if (shared) munmap(memory, sizeof(Shared));
  OpenFiles::Instance().Close(file);
  return out.str();
}

}  // namespace poseidon
