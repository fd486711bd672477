#pragma once
// A graph: work that was captured instead of done, and is queued again, without the host's code, at each replay.

#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "runtime/stream.h"

namespace simdev {

class Graph : public std::enable_shared_from_this<Graph> {
 public:
  Graph();
  ~Graph();

  // What the stream is given from now on belongs to this graph; so does what streams are given that wait for its
  // events.
  void begin(Stream& stream);
  void end();

  void add(std::function<Work()> make);
  void join(Stream& stream);

  // Throws that this is not permitted in a capture. The capture is lost, and end() says so.
  [[noreturn]] void spoil(const std::string& what);

  // Queues all the work on the stream.
  void replay(Stream& stream);

  // Memory that was taken in a capture is used again by the same graph only. The number names it.
  uint64_t pool() const { return pool_; }
  void share_pool(uint64_t pool);

 private:
  mutable std::mutex mutex_;
  std::vector<std::function<Work()>> nodes_;
  std::set<Stream*> streams_;
  std::string spoilt_;
  uint64_t pool_;
};

}  // namespace simdev
