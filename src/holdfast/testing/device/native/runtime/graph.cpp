#include "runtime/graph.h"

#include <c10/util/Exception.h>

#include <map>
#include <utility>

#include "runtime/device.h"
#include "runtime/memory.h"
#include "runtime/settings.h"

namespace simdev {

namespace {

// How many graphs use each pool. Never destroyed: graphs of Python may end later.
struct Pools {
  std::mutex mutex;
  uint64_t num_made = 0;
  std::map<uint64_t, int> num_users;
};

Pools& pools() {
  static auto* const all = new Pools;
  return *all;
}

void leave_pool(uint64_t pool) {
  {
    const std::lock_guard<std::mutex> lock(pools().mutex);
    if (--pools().num_users[pool] > 0) return;
    pools().num_users.erase(pool);
  }
  for (int index = 0; index < num_devices(); ++index) memory(index).open_pool(pool);
}

}  // namespace

Graph::Graph() {
  const std::lock_guard<std::mutex> lock(pools().mutex);
  pool_ = ++pools().num_made;
  pools().num_users[pool_] = 1;
}

Graph::~Graph() { leave_pool(pool_); }

void Graph::share_pool(uint64_t pool) {
  {
    const std::lock_guard<std::mutex> lock(pools().mutex);
    ++pools().num_users[pool];
  }
  leave_pool(std::exchange(pool_, pool));
}

void Graph::begin(Stream& stream) {
  TORCH_CHECK(!stream.capture(), "this stream is captured already");
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    nodes_.clear();
    spoilt_.clear();
  }
  join(stream);
}

void Graph::join(Stream& stream) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    streams_.insert(&stream);
  }
  stream.set_capture(shared_from_this());
}

void Graph::end() {
  std::set<Stream*> streams;
  std::string why;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    streams.swap(streams_);
    why = spoilt_;
  }
  for (Stream* stream : streams) stream->set_capture(nullptr);
  TORCH_CHECK(why.empty(), "the capture is lost: ", why);
}

void Graph::add(std::function<Work()> make) {
  const std::lock_guard<std::mutex> lock(mutex_);
  nodes_.push_back(std::move(make));
}

void Graph::spoil(const std::string& what) {
  const auto why = what + " is not permitted while the stream is captured";
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    spoilt_ = why;
  }
  TORCH_CHECK(false, settings().name, " error: ", why);
}

void Graph::replay(Stream& stream) {
  std::vector<std::function<Work()>> nodes;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    nodes = nodes_;
  }
  ++counts().replays;
  for (const auto& make : nodes) stream.push(make());
}

}  // namespace simdev
