#include "runtime/graph.h"

#include <c10/util/Exception.h>

#include <atomic>

#include "runtime/device.h"
#include "runtime/settings.h"

namespace simdev {

namespace {
std::atomic<uint64_t> num_pools{0};
}  // namespace

Graph::Graph() : pool_(++num_pools) {}

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
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    streams.swap(streams_);
  }
  for (Stream* stream : streams) stream->set_capture(nullptr);
  TORCH_CHECK(spoilt_.empty(), "the capture is lost: ", spoilt_);
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
