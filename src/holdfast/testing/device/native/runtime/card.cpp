#include "runtime/card.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "runtime/device.h"
#include "runtime/errors.h"
#include "runtime/settings.h"

namespace simdev {

namespace {

// Held while the files of a card are read and one of them changes.
class FolderLock {
 public:
  explicit FolderLock(const std::string& folder) {
    file_ = open((folder + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    TORCH_CHECK(file_ >= 0, "cannot open ", folder,
                "/lock: SIMULATED_DEVICE_CARDS must name a folder that can be written");
    flock(file_, LOCK_EX);
  }
  ~FolderLock() { close(file_); }
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int file_ = -1;
};

bool is_shared() { return !settings().cards.empty(); }

}  // namespace

std::string Card::folder() const { return settings().cards + "/" + std::to_string(index_); }

void Card::open_own_file() {
  name_ = std::to_string(getpid());
  const auto path = folder() + "/" + name_;
  file_ = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  TORCH_CHECK(file_ >= 0, "cannot write ", path);
  flock(file_, LOCK_EX);
}

void Card::write_own() const {
  std::array<char, 24> text{};
  const int length = std::snprintf(text.data(), text.size(), "%-20zu\n", own_);
  TORCH_CHECK(pwrite(file_, text.data(), length, 0) == length, "cannot write the memory held of card ", index_);
}

std::map<long, size_t> Card::read_others() {
  std::map<long, size_t> held;
  for (const auto& entry : std::filesystem::directory_iterator(folder())) {
    const auto name = entry.path().filename().string();
    if (name == "lock" || name == name_) continue;
    const int file = open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) continue;
    if (flock(file, LOCK_SH | LOCK_NB) == 0) {
      unlink(entry.path().c_str());  // nobody holds it: the process and its children have gone
    } else {
      size_t bytes = 0;
      std::ifstream(entry.path()) >> bytes;
      held[std::atol(name.c_str())] = bytes;
    }
    close(file);
  }
  return held;
}

size_t Card::held_by_others() {
  size_t all = 0;
  if (is_shared()) {
    for (const auto& [process, bytes] : read_others()) all += bytes;
  }
  return all;
}

bool Card::take(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::optional<FolderLock> folder_lock;
  if (is_shared()) {
    std::filesystem::create_directories(folder());
    folder_lock.emplace(folder());
    if (file_ < 0) open_own_file();
  }
  if (held_by_others() + own_ + bytes > total()) return false;
  own_ += bytes;
  if (is_shared()) write_own();
  return true;
}

void Card::give_back(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  own_ -= bytes;
  if (is_shared() && file_ >= 0) write_own();
}

void Card::take_context() {
  if (!take(settings().context)) throw_out_of_memory(index_, settings().context, unused(), total());
}

size_t Card::total() const { return settings().memory; }

size_t Card::unused() {
  const auto all = holders();
  size_t taken = 0;
  for (const auto& [process, bytes] : all) taken += bytes;
  return taken < total() ? total() - taken : 0;
}

std::map<long, size_t> Card::holders() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::map<long, size_t> held;
  if (is_shared() && std::filesystem::exists(folder())) {
    const FolderLock folder_lock(folder());
    held = read_others();
  }
  if (own_ > 0) held[getpid()] = own_;
  return held;
}

Card& card(int index) {
  static auto* const all = [] {
    auto* cards = new std::vector<Card*>;
    for (int i = 0; i < num_devices(); ++i) cards->push_back(new Card(i));
    return cards;
  }();
  return *all->at(index);
}

}  // namespace simdev
