#include "aten/graphs.h"

#if __has_include(<ATen/core/GraphImplInterface.h>)

#include <ATen/core/GraphImplInterface.h>

#include <fstream>

#include "aten/launch.h"
#include "runtime/device.h"
#include "runtime/graph.h"

namespace simdev {

namespace {

class TorchGraph final : public at::GraphImplInterface {
 public:
  explicit TorchGraph(const at::GraphImplArgs&) {}

  void capture_begin(at::MempoolId_t pool, at::GraphCaptureMode) override {
    TORCH_CHECK(!is_captured_, "this graph holds a capture already; reset() it first");
    if (pool.first) graph_->share_pool(pool.first);
    graph_->begin(current_stream(current_device()));
  }
  void capture_end() override {
    graph_->end();
    is_captured_ = true;
  }
  void instantiate() override {}
  void replay() override {
    TORCH_CHECK(is_captured_, "replay() of a graph that was not captured");
    graph_->replay(current_stream(current_device()));
  }
  void reset() override {
    graph_ = std::make_shared<Graph>();
    is_captured_ = false;
  }
  at::MempoolId_t pool() const override { return {graph_->pool(), 0}; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string& path) override {
    std::ofstream(path) << "graph of pool " << graph_->pool() << "\n";
  }

 private:
  std::shared_ptr<Graph> graph_ = std::make_shared<Graph>();
  bool is_captured_ = false;
};

}  // namespace

void register_graphs() {
  at::GraphImplRegistry()->Register(c10::DeviceTypeName(kDeviceType, false), [](const at::GraphImplArgs& args) {
    return std::unique_ptr<at::GraphImplInterface>(new TorchGraph(args));
  });
}

}  // namespace simdev

#else

namespace simdev {
void register_graphs() {}
}  // namespace simdev

#endif
