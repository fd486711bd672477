#include "distributed/backend.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>

#include "aten/launch.h"
#include "distributed/work.h"
#include "runtime/device.h"
#include "runtime/errors.h"
#include "runtime/event.h"
#include "runtime/memory.h"
#include "runtime/process.h"
#include "runtime/settings.h"

namespace simdev {

namespace {

using c10d::OpType;
using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Carrier = c10::intrusive_ptr<c10d::Backend>;

// What ends a collective whose group was aborted.
struct Aborted {};

class Backend final : public c10d::Backend {
 public:
  Backend(Carrier carrier, c10::intrusive_ptr<c10d::Store> store, double timeout_s)
      : c10d::Backend(carrier->getRank(), carrier->getSize()),
        carrier_(std::move(carrier)),
        store_(std::move(store)),
        timeout_s_(timeout_s) {}

  ~Backend() override {
    if (forked()) return;
    // Streams of a group that was aborted end what they have soon; one that hangs is nobody's any more.
    for (auto& [key, stream] : streams_) {
      if (*aborted_ || stream->drain_within(0)) stream->device().take_back(*stream);
    }
  }

  const std::string getBackendName() const override { return "simccl"; }
  // Not in every version of PyTorch: the options, the time-out, shutdown().
  c10::intrusive_ptr<Options> getBackendOptions() {
    const std::chrono::duration<double> seconds(timeout_s_);
    return c10::make_intrusive<Options>("simccl", std::chrono::duration_cast<std::chrono::milliseconds>(seconds));
  }
  void setTimeout(std::chrono::milliseconds) {}

  // The device goes on, with what is in its memory. Nothing of the group that is still under way writes to it any more.
  void abort() override {
    std::set<WorkPtr> pending;
    std::vector<Carrier> others;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      *aborted_ = true;
      pending = pending_;
      others = others_;
    }
    for (const auto& work : pending) work->abort();
    carrier_->abort();
    for (const auto& other : others) other->abort();
    wait_if_aborts_hang();
  }

  // Waits, as long as the group's timeout, for what is queued.
  void shutdown() {
    for (Stream* stream : used_streams()) {
      if (!*aborted_) stream->drain_within(timeout_s_);
    }
    abort();
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return queue(OpType::BROADCAST, tensors, tensors, [this, options](const Carrier& by, Tensors in) {
      carry(by->broadcast(in, options));
      return in;
    });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return queue(OpType::ALLREDUCE, tensors, tensors, [this, op = options.reduceOp](const Carrier& by, Tensors in) {
      for (auto& tensor : in) reduce_all(by, tensor, op);
      return in;
    });
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const bool is_root = options.rootRank == getRank();
    return queue(OpType::REDUCE, tensors, tensors,
                 [this, op = options.reduceOp, is_root](const Carrier& by, Tensors in) {
                   auto whole = in[0].clone();
                   reduce_all(by, whole, op);
                   return is_root ? Tensors{whole} : in;
                 });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return queue(OpType::ALLGATHER, inputs, outputs.at(0),
                 [this](const Carrier& by, Tensors in) { return gather_all(by, in[0]); });
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    return queue(OpType::_ALLGATHER_BASE, {input}, {output},
                 [this](const Carrier& by, Tensors in) { return Tensors{at::cat(flat(gather_all(by, in[0])))}; });
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return queue(OpType::COALESCED, inputs, outputs, [this](const Carrier& by, Tensors in) {
      Tensors wholes;
      for (const auto& tensor : in) wholes.push_back(at::cat(flat(gather_all(by, tensor))));
      return wholes;
    });
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const bool is_root = options.rootRank == getRank();
    return queue(OpType::GATHER, inputs, is_root ? outputs.at(0) : Tensors{},
                 [this, is_root](const Carrier& by, Tensors in) {
                   auto all = gather_all(by, in[0]);
                   return is_root ? all : Tensors{};
                 });
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    const bool is_root = options.rootRank == getRank();
    return queue(OpType::SCATTER, is_root ? inputs.at(0) : Tensors{}, outputs,
                 [this, options, is_root, like = on_host(outputs[0])](const Carrier& by, Tensors in) {
                   Tensors out{at::empty_like(like)};
                   std::vector<Tensors> parts;
                   if (is_root) parts.push_back(in);
                   carry(by->scatter(out, parts, options));
                   return out;
                 });
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    const auto op = options.reduceOp;
    return queue(OpType::REDUCE_SCATTER, inputs.at(0), outputs, [this, op](const Carrier& by, Tensors in) {
      auto whole = at::cat(flat(in));
      reduce_all(by, whole, op);
      const auto before = std::accumulate(in.begin(), in.begin() + getRank(), int64_t{0},
                                          [](int64_t sum, const at::Tensor& part) { return sum + part.numel(); });
      return Tensors{whole.narrow(0, before, in[getRank()].numel())};
    });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return queue(OpType::_REDUCE_SCATTER_BASE, {input}, {output},
                 [this, op = options.reduceOp](const Carrier& by, Tensors in) {
                   return Tensors{reduced_part(by, in[0], op)};
                 });
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    const auto op = options.reduceOp;
    return queue(OpType::COALESCED, inputs, outputs, [this, op](const Carrier& by, Tensors in) {
      Tensors parts;
      for (const auto& tensor : in) parts.push_back(reduced_part(by, tensor, op));
      return parts;
    });
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    return queue(OpType::ALLTOALL_BASE, {input}, {output},
                 [this, like = on_host(output), output_sizes, input_sizes,
                  options](const Carrier& by, Tensors in) mutable {
                   auto out = at::empty_like(like, at::MemoryFormat::Contiguous);
                   carry(by->alltoall_base(out, in[0], output_sizes, input_sizes, options));
                   return Tensors{out};
                 });
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    std::vector<int64_t> output_sizes, input_sizes;
    for (const auto& tensor : outputs) output_sizes.push_back(tensor.numel());
    for (const auto& tensor : inputs) input_sizes.push_back(tensor.numel());
    const auto talk = [this, output_sizes, input_sizes, options](const Carrier& by, Tensors in) {
      auto sent = at::cat(flat(in));
      auto received =
          at::empty({std::accumulate(output_sizes.begin(), output_sizes.end(), int64_t{0})}, sent.options());
      auto taken = output_sizes, given = input_sizes;  // the carrier keeps what it is given
      carry(by->alltoall_base(received, sent, taken, given, options));
      return received.split_with_sizes(output_sizes);
    };
    return queue(OpType::ALLTOALL, inputs, outputs, talk);
  }

  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    return queue(OpType::SEND, tensors, {},
                 [this, peer, tag](const Carrier& by, Tensors in) {
                   carry_between_two(by->send(in, peer, tag));
                   return Tensors{};
                 },
                 {.line = 1 + 2 * peer});
  }

  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    return queue(OpType::RECV, {}, tensors,
                 [this, peer, tag, like = on_host(tensors[0])](const Carrier& by, Tensors) {
                   Tensors out{at::empty_like(like, at::MemoryFormat::Contiguous)};
                   carry_between_two(by->recv(out, peer, tag));
                   return out;
                 },
                 {.line = 2 + 2 * peer});
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    const auto bound = getBoundDeviceId();
    const int index = !options.device_ids.empty() ? static_cast<int>(options.device_ids[0])
                      : bound                     ? bound->index()
                                                  : current_device();
    return queue(OpType::BARRIER, {}, {},
                 [this](const Carrier& by, Tensors) {
                   auto nothing = at::zeros({1}, at::TensorOptions().device(at::kCPU));
                   reduce_all(by, nothing, ReduceOp::SUM);
                   return Tensors{};
                 },
                 {.host_waits = true, .device = index});
  }

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

 private:
  // Does the work of a collective with tensors of the host, and returns the results in the order of the outputs.
  using Talk = std::function<Tensors(const Carrier&, Tensors)>;

  struct How {
    int line = 0;  // collectives go one after the other; what is sent to and received from a peer goes beside them
    bool host_waits = false;
    int device = -1;
  };

  WorkPtr queue(OpType kind, Tensors inputs, Tensors outputs, Talk talk, How how) {
    TORCH_CHECK_WITH(DistBackendError, !*aborted_, "the simccl group of rank ", getRank(), " was aborted");
    ++counts().collectives;
    ++sequence_;
    const int index = how.device >= 0 ? how.device : (inputs.empty() ? outputs : inputs).at(0).device().index();
    Stream& stream = stream_for(index, how.line);
    Event ready(false);
    ready.record(current_stream(index));
    ready.block(stream);
    const auto self = c10::intrusive_ptr<Backend>::reclaim_copy(this);
    const Carrier by = how.line ? carrier_ : carrier_for(index);
    stream.push([self, by, &stream, in = hosts_of(inputs), out = hosts_of(outputs), talk = std::move(talk)]() mutable {
      self->perform(stream.device(), by, in, out, talk);
    });
    for (const auto* tensors : {&inputs, &outputs}) {
      for (const auto& tensor : *tensors) record_use(tensor, stream);
    }
    return c10::make_intrusive<CollectiveWork>(kind, getRank(), stream, std::move(outputs), how.host_waits);
  }
  WorkPtr queue(OpType kind, Tensors inputs, Tensors outputs, Talk talk) {
    return queue(kind, std::move(inputs), std::move(outputs), std::move(talk), How{});
  }

  // Works on copies: what the carrier still does after an abort touches no memory of the device.
  void perform(Device& device, const Carrier& by, const Tensors& in, Tensors& out, const Talk& talk) {
    if (*aborted_) return end_aborted();
    try {
      Tensors copies;
      for (const auto& tensor : in) copies.push_back(tensor.clone(at::MemoryFormat::Contiguous));
      const Tensors results = talk(by, std::move(copies));
      if (*aborted_) return end_aborted();
      for (size_t i = 0; i < out.size(); ++i) out[i].copy_(results.at(i).reshape(out[i].sizes()));
    } catch (const Aborted&) {
      end_aborted();
    } catch (const std::exception& error) {
      // A peer has gone. NCCL's kernels do not know, and wait for it until somebody aborts.
      if (!*aborted_) TORCH_WARN("a collective of rank ", getRank(), " hangs until it is aborted: ", brief(error));
      device.wait_until([this] { return aborted_->load(); });
      end_aborted();
    }
  }

  static void wait_if_aborts_hang() {
    const WithoutGil unlocked;
    while (settings().abort == Abort::kHangs && !stopping()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  void end_aborted() const {
    if (settings().abort == Abort::kError) {
      throw StreamFailed{std::make_shared<Problem>(c10::str("a collective of rank ", getRank(), " was aborted"))};
    }
  }

  // Waits, on the stream, for what the carrier does.
  void carry(const WorkPtr& work) const {
    const Pauses pauses(std::chrono::microseconds(100));
    while (!work->isCompleted()) {
      if (*aborted_ || stopping()) throw Aborted();
      std::this_thread::sleep_for(pauses.next());
    }
    work->wait();
  }

  // The carrier's send and receive are done by those who wait for them: no asking. abort() ends the wait.
  void carry_between_two(const WorkPtr& work) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (*aborted_) throw Aborted();
      pending_.insert(work);
    }
    const auto forget = c10::make_scope_exit([&] {
      const std::lock_guard<std::mutex> lock(mutex_);
      pending_.erase(work);
    });
    if (!work->wait()) throw Aborted();
  }

  void reduce_all(const Carrier& by, at::Tensor& tensor, const ReduceOp& op) const {
    c10d::AllreduceOptions options;
    const bool is_mean = op == ReduceOp::AVG, is_scaled = op == ReduceOp::PREMUL_SUM;
    options.reduceOp = is_mean || is_scaled ? ReduceOp(ReduceOp::SUM) : op;
    if (is_scaled) tensor.mul_(factor_of(op));
    Tensors one{tensor};
    carry(by->allreduce(one, options));
    if (is_mean) tensor.div_(getSize());
  }

  static double factor_of(const ReduceOp& op) {
    const auto* supplement = dynamic_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
    TORCH_CHECK(supplement && !supplement->tensor_factor.defined(),
                "PREMUL_SUM is simulated for factors that are numbers");
    return supplement->double_factor;
  }

  at::Tensor reduced_part(const Carrier& by, const at::Tensor& whole, const ReduceOp& op) const {
    auto sum = whole.reshape({-1});
    reduce_all(by, sum, op);
    const int64_t part = sum.numel() / getSize();
    return sum.narrow(0, getRank() * part, part);
  }

  Tensors gather_all(const Carrier& by, const at::Tensor& mine) const {
    std::vector<Tensors> all(1);
    for (int rank = 0; rank < getSize(); ++rank) all[0].push_back(at::empty_like(mine));
    Tensors one{mine};
    carry(by->allgather(all, one, c10d::AllgatherOptions()));
    return all[0];
  }

  static Tensors flat(const Tensors& tensors) {
    Tensors all;
    for (const auto& tensor : tensors) all.push_back(tensor.reshape({-1}));
    return all;
  }

  static Tensors hosts_of(const Tensors& tensors) {
    Tensors all;
    for (const auto& tensor : tensors) all.push_back(on_host(tensor));
    return all;
  }

  static void record_use(const at::Tensor& tensor, const Stream& stream) {
    auto* const block = static_cast<Block*>(tensor.storage().data_ptr().get_context());
    if (block) memory(block->device).record(block, stream.id());
  }

  Stream& stream_for(int device, int line) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& stream = streams_[{device, line}];
    if (!stream) stream = &simdev::device(device).lend_stream();
    return *stream;
  }

  // Of each device the group has one, as NCCL: what devices do at the same time comes in no order. Made by all ranks
  // at the first collective of a device: the first device of a rank meets the first of the others, and so on.
  Carrier carrier_for(int device) {
    const WithoutGil unlocked;
    const std::lock_guard<std::mutex> making(making_);
    const auto place = places_.try_emplace(device, places_.size()).first->second;
    if (place <= others_.size()) return place ? others_[place - 1] : carrier_;
    std::vector<int> everybody(getSize());
    std::iota(everybody.begin(), everybody.end(), 0);
    const auto store = c10::make_intrusive<c10d::PrefixStore>(c10::str("device", place), store_);
    const auto options = carrier_->getBackendOptions();
    options->global_ranks_in_group.assign(everybody.begin(), everybody.end());  // which gloo reads, and nobody told it
    auto made = carrier_->split(store, everybody, options);
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK_WITH(DistBackendError, !*aborted_, "the simccl group of rank ", getRank(), " was aborted");
    others_.push_back(made);
    return made;
  }

  std::vector<Stream*> used_streams() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Stream*> all;
    for (const auto& [key, stream] : streams_) all.push_back(stream);
    return all;
  }

  const Carrier carrier_;         // of the first device, and of all that is sent from one rank to another
  std::vector<Carrier> others_;   // of further devices
  std::map<int, size_t> places_;  // of devices: 0 is the first
  std::mutex making_;             // of another carrier
  const c10::intrusive_ptr<c10d::Store> store_;
  const double timeout_s_;
  const std::shared_ptr<std::atomic<bool>> aborted_ = std::make_shared<std::atomic<bool>>(false);
  std::mutex mutex_;
  std::map<std::pair<int, int>, Stream*> streams_;  // by device and line
  std::set<WorkPtr> pending_;                       // sends and receives under way
  std::atomic<uint64_t> sequence_{0};
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(c10::intrusive_ptr<c10d::Backend> carrier,
                                               c10::intrusive_ptr<c10d::Store> store, double timeout_s) {
  return c10::make_intrusive<Backend>(std::move(carrier), std::move(store), timeout_s);
}

}  // namespace simdev
