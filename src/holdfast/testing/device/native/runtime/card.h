#pragma once
// A card: the memory that all processes share which use it.
//
// With a folder in SIMULATED_DEVICE_CARDS each process keeps a file per card that says how much it holds, and holds a
// lock on it. Children that it forked hold the lock too: as on real cards, the memory of a process that was killed is
// taken until the last of them has gone.

#include <cstddef>
#include <map>
#include <mutex>
#include <string>

namespace simdev {

class Card {
 public:
  explicit Card(int index) : index_(index) {}

  // Takes bytes for this process; returns false, and takes none, where the card has not so many left.
  bool take(size_t bytes);
  void give_back(size_t bytes);

  // What a process takes of a card for being there. Throws if the card is full.
  void take_context();

  size_t total() const;
  size_t unused();

  // Bytes held, by the process that holds or held them.
  std::map<long, size_t> holders();

 private:
  size_t held_by_others();
  std::map<long, size_t> read_others();
  std::string folder() const;
  void open_own_file();
  void write_own() const;

  const int index_;
  std::mutex mutex_;
  size_t own_ = 0;
  int file_ = -1;
  std::string name_;
};

Card& card(int index);

}  // namespace simdev
