// Calls of our ops without Python between the caller and the launch: key, plan, buffers, launches, and the gradient.
//
// A Call holds the programs of one op, by the same key that ops/record/plans.py has. A program is a plan as data:
// buffers to make, kernels to launch, outputs. What a Call does not know, or must not decide (tensors of a class of their
// own, modes, transforms, lazily negated tensors, derivatives of derivatives), goes to its Python functions.
// Nothing here decides what runs: Python plans, this repeats.

#include <Python.h>

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#ifdef SUBLIGHT_CUDA
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda.h>
#include <dlfcn.h>
#endif

namespace py = pybind11;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

namespace {

using Key = std::vector<int64_t>;

struct HashOfKey {
  size_t operator()(const Key& key) const {
    uint64_t hash = 1469598103934665603ull;
    for (int64_t word : key) hash = (hash ^ static_cast<uint64_t>(word)) * 1099511628211ull + (hash >> 29);
    return hash;
  }
};

enum Tag : int64_t { kFloat = 1, kBool, kInt, kNone, kText, kList };

// An argument that is no tensor: its words of a key, and itself for Python's functions.
struct Value {
  Key words;
  PyObject* object = nullptr;  // owned; its references change under the GIL alone
};

// false: a value that has no words here
bool append_value(Key& key, PyObject* object) {
  if (PyFloat_CheckExact(object)) {
    int64_t bits;
    const double value = PyFloat_AS_DOUBLE(object);
    std::memcpy(&bits, &value, sizeof bits);
    key.insert(key.end(), {kFloat, bits});
  } else if (PyBool_Check(object)) {
    key.insert(key.end(), {kBool, object == Py_True});
  } else if (PyLong_CheckExact(object)) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow) return false;
    key.insert(key.end(), {kInt, value});
  } else if (object == Py_None) {
    key.push_back(kNone);
  } else if (PyUnicode_CheckExact(object)) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(object, &size);
    if (!text) return PyErr_Clear(), false;
    key.insert(key.end(), {kText, size});
    for (Py_ssize_t at = 0; at < size; at += 8) {
      int64_t word = 0;
      std::memcpy(&word, text + at, std::min<Py_ssize_t>(8, size - at));
      key.push_back(word);
    }
  } else if (PyList_CheckExact(object) || PyTuple_CheckExact(object)) {
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(object);
    PyObject** items = PySequence_Fast_ITEMS(object);
    key.insert(key.end(), {kList, size});
    for (Py_ssize_t at = 0; at < size; ++at) {
      if (!PyLong_CheckExact(items[at]) || !append_value(key, items[at])) return false;
    }
  } else {
    return false;
  }
  return true;
}

constexpr auto kStrange = c10::DispatchKeySet({
    c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Negative,
    c10::DispatchKey::Conjugate, c10::DispatchKey::ZeroTensor, c10::DispatchKey::Functionalize,
    c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::BatchedNestedTensor,
});
constexpr auto kListening = c10::DispatchKeySet({
    c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PythonDispatcher,
    c10::DispatchKey::PreDispatch, c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
    c10::DispatchKey::FuncTorchVmapMode, c10::DispatchKey::Tracer, c10::DispatchKey::Functionalize,
});

std::atomic<int> pauses{0};            // Python wants to see every launch
std::vector<PyObject*> hooks;          // Triton's lists of functions that are called around launches

bool somebody_listens() {
  if (pauses.load(std::memory_order_relaxed)) return true;
  for (PyObject* calls : hooks) {
    if (Py_SIZE(calls)) return true;
  }
  const auto tls = c10::impl::tls_local_dispatch_key_set();
  return (tls.included_ & kListening) != c10::DispatchKeySet();
}

// false: a tensor that Python must look at
bool append_tensor(Key& key, const at::Tensor& x, bool with_grad) {
  if ((x.key_set() & kStrange) != c10::DispatchKeySet() || x.layout() != at::kStrided) return false;
#ifdef SUBLIGHT_CUDA
  if (!x.is_cuda()) return false;
#endif
  if (x._fw_grad(/*level=*/0).defined()) return false;
  const auto sizes = x.sizes();
  const auto strides = x.strides();
  key.push_back((static_cast<int64_t>(x.scalar_type()) << 40) | (int64_t(x.get_device() + 1) << 32) |
                (static_cast<int64_t>(sizes.size()) << 8) | ((reinterpret_cast<uintptr_t>(x.const_data_ptr()) & 15) << 1) |
                static_cast<int64_t>(with_grad && x.requires_grad()));
  key.insert(key.end(), sizes.begin(), sizes.end());
  key.insert(key.end(), strides.begin(), strides.end());
  return true;
}

struct Buffer {
  std::vector<int64_t> shape, strides;  // no strides: contiguous
  at::ScalarType dtype;
  bool is_zero;
};

struct Parameter {
  enum Kind { kTensor, kLiteral, kFree } kind;
  int64_t index;  // of the tensor, or of the argument
  uint64_t bits;  // of the literal
  bool is_float32 = false, is_float64 = false;  // how a free number is passed
};

struct Launch {
  uint64_t function = 0;
  unsigned grid[3] = {1, 1, 1};
  unsigned threads = 0, shared_bytes = 0;
  std::vector<Parameter> parameters;
  PyObject* python = nullptr;  // a step that is taken in Python, with these tensors: where kernels are interpreted
};

struct Program {
  std::vector<Buffer> buffers;
  std::vector<Launch> launches;
  std::vector<int64_t> outputs;  // among arguments and buffers
};

#ifdef SUBLIGHT_CUDA
using LaunchKernel = CUresult (*)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                  CUstream, void**, void**);
using Memset = CUresult (*)(CUdeviceptr, unsigned char, size_t, CUstream);

template <class Function>
Function driver_function(const char* name) {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
  TORCH_CHECK(driver, "sublight: libcuda.so.1 cannot be opened");
  void* function = dlsym(driver, name);
  TORCH_CHECK(function, "sublight: libcuda.so.1 has no ", name);
  return reinterpret_cast<Function>(function);
}

LaunchKernel launch_kernel() {
  static const auto function = driver_function<LaunchKernel>("cuLaunchKernel");
  return function;
}

// At half the host's time of PyTorch's fill, which is a kernel behind the dispatcher.
void clear(const at::Tensor& x, CUstream stream) {
  static const auto memset = driver_function<Memset>("cuMemsetD8Async");
  if (!x.nbytes()) return;
  const auto status = memset(reinterpret_cast<CUdeviceptr>(x.data_ptr()), 0, x.nbytes(), stream);
  TORCH_CHECK(status == CUDA_SUCCESS, "sublight: a buffer could not be cleared (CUDA error ", int(status), ")");
}
#endif

// Arguments that are no tensors stand as undefined ones; `free_numbers` has the values of free arguments by place.
using Free = std::vector<std::pair<int64_t, double>>;

std::vector<at::Tensor> run(const Program& program, const std::vector<at::Tensor>& args,
                            const std::vector<double>& free_floats, const std::vector<int64_t>& free_ints) {
  const at::Tensor* first = nullptr;
  for (const auto& x : args) {
    if (x.defined()) {
      first = &x;
      break;
    }
  }
#ifdef SUBLIGHT_CUDA
  const c10::cuda::OptionalCUDAGuard guard(
      first->get_device() == c10::cuda::current_device() ? std::nullopt : std::make_optional(first->device()));
  const CUstream stream = c10::cuda::getCurrentCUDAStream(first->get_device()).stream();
#endif
  std::vector<at::Tensor> tensors(args);
  tensors.reserve(args.size() + program.buffers.size());
  for (const auto& buffer : program.buffers) {
    const auto options = at::TensorOptions().dtype(buffer.dtype).device(first->device());
    tensors.push_back(buffer.strides.empty() ? at::empty(buffer.shape, options)
                                             : at::empty_strided(buffer.shape, buffer.strides, options));
    if (!buffer.is_zero) continue;
#ifdef SUBLIGHT_CUDA
    clear(tensors.back(), stream);
#else
    tensors.back().zero_();
#endif
  }
  for (const auto& launch : program.launches) {
    if (launch.python) {
      py::gil_scoped_acquire gil;
      py::list on;
      for (const auto& parameter : launch.parameters) on.append(py::cast(tensors[parameter.index]));
      py::handle(launch.python)(*on);
      continue;
    }
#ifdef SUBLIGHT_CUDA
    constexpr size_t kMost = 48;
    uint64_t words[kMost];
    void* pointers[kMost];
    const size_t count = launch.parameters.size();
    TORCH_CHECK(count + 2 <= kMost, "sublight: a kernel with too many parameters");
    for (size_t at = 0; at < count; ++at) {
      const auto& parameter = launch.parameters[at];
      if (parameter.kind == Parameter::kTensor) {
        words[at] = reinterpret_cast<uint64_t>(tensors[parameter.index].data_ptr());
      } else if (parameter.kind == Parameter::kLiteral) {
        words[at] = parameter.bits;
      } else if (parameter.is_float32) {
        const float value = static_cast<float>(free_floats[parameter.index]);
        words[at] = 0;
        std::memcpy(&words[at], &value, sizeof value);
      } else if (parameter.is_float64) {
        std::memcpy(&words[at], &free_floats[parameter.index], sizeof(double));
      } else {
        words[at] = static_cast<uint64_t>(free_ints[parameter.index]);
      }
      pointers[at] = &words[at];
    }
    words[count] = words[count + 1] = 0;  // Triton's scratch memories, which such kernels do not have
    pointers[count] = &words[count];
    pointers[count + 1] = &words[count + 1];
    const auto status = launch_kernel()(reinterpret_cast<CUfunction>(launch.function), launch.grid[0], launch.grid[1],
                                        launch.grid[2], launch.threads, 1, 1, launch.shared_bytes, stream, pointers,
                                        nullptr);
    TORCH_CHECK(status == CUDA_SUCCESS, "sublight: a kernel could not be launched (CUDA error ", int(status), ")");
#else
    TORCH_CHECK(false, "sublight: built without CUDA");
#endif
  }
  std::vector<at::Tensor> outputs;
  outputs.reserve(program.outputs.size());
  for (int64_t at : program.outputs) outputs.push_back(tensors[at]);
  return outputs;
}

struct Call;

// How an op is differentiated: ops/record/gradient.py has the same in words.
struct Gradient {
  Call* by = nullptr;
  std::vector<std::pair<bool, int64_t>> saves;   // (is an output, place)
  std::vector<std::vector<int64_t>> gives;       // for each output of `by` the arguments
  std::vector<int64_t> options;                  // arguments that are no tensors
  std::vector<Key> constants;                    // words of what is the same for every call
};

struct Entry {
  std::shared_ptr<const Program> program;
  PyObject* python = nullptr;  // what runs instead of a program: PyTorch's own composition
};

struct Call {
  std::string name;
  std::string kinds;        // a letter an argument: t tensor, v value, f free value
  int64_t results = 0;      // outputs that are the caller's; 0: all
  bool is_tuple = false;    // whether the caller gets a tuple
  PyObject* slow = nullptr;           // (args) -> results
  PyObject* slow_backward = nullptr;  // (grads, saved, values) -> a gradient for each argument
  Gradient gradient;
  std::unordered_map<Key, Entry, HashOfKey> entries;
  std::shared_mutex mutex;  // backward passes come in threads of their own, without the GIL

  const Entry* find(const Key& key) {
    std::shared_lock lock(mutex);
    const auto found = entries.find(key);
    return found == entries.end() ? nullptr : &found->second;  // entries stay where they are, and are never taken out
  }
};

py::object wrapped(const std::vector<at::Tensor>& tensors, bool is_tuple) {
  if (tensors.empty()) return py::none();
  if (!is_tuple) return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensors.at(0)));
  py::tuple out(tensors.size());
  for (size_t at = 0; at < tensors.size(); ++at) {
    out[at] = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensors[at]));
  }
  return out;
}

// Newer versions of PyTorch count references to nodes inside of the nodes, older ones by shared pointers. What one of the
// two has not must not be named outright: names that depend on a template's argument are looked up when it is used.
template <class Base>
constexpr bool kCountsItself = std::is_base_of_v<c10::intrusive_ptr_target, Base>;

template <class Kind, class Base = Node>
auto new_node(Call* call) {
  if constexpr (kCountsItself<Base>) {
    return c10::make_intrusive<Kind>(call);
  } else {
    return std::shared_ptr<Kind>(new Kind(call), [](Base* node) { deleteNode(node); });  // no deep recursion
  }
}

template <class Base>
auto pointer_to(Base* node) {
  if constexpr (kCountsItself<Base>) {
    return c10::intrusive_ptr<Base>::reclaim_copy(node);
  } else {
    return node->getptr();
  }
}

struct Backward : public Node {
  Call* call;
  std::vector<SavedVariable> saved;
  std::vector<Value> values;  // of all arguments; those that are tensors are empty

  explicit Backward(Call* of) : call(of) {}

  ~Backward() override {
    bool any = false;
    for (const auto& value : values) any |= value.object != nullptr;
    if (any && Py_IsInitialized()) {
      py::gil_scoped_acquire gil;
      for (auto& value : values) Py_XDECREF(value.object);
    }
  }

  std::string name() const override { return "sublight::" + call->name; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    saved.clear();
  }

  variable_list apply(variable_list&& grads) override {
    std::vector<at::Tensor> kept;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      TORCH_CHECK(saved.size() == call->gradient.saves.size(),
                  "Trying to backward through the graph a second time: pass retain_graph=True the first time");
      kept.reserve(saved.size());
      for (auto& each : saved) kept.push_back(each.unpack(pointer_to(static_cast<Node*>(this))));
    }
    if (auto found = quickly(grads, kept)) return *found;
    return in_python(grads, kept);
  }

  std::optional<variable_list> quickly(const variable_list& grads, const std::vector<at::Tensor>& kept) {
    if (at::GradMode::is_enabled() || somebody_listens() || !grads[0].defined()) return std::nullopt;
    Key key;
    key.reserve(64);
    std::vector<at::Tensor> args;
    args.reserve(grads.size() + kept.size() + call->gradient.options.size());
    for (const auto* list : {static_cast<const std::vector<at::Tensor>*>(&grads), &kept}) {
      for (const auto& x : *list) {
        if (!x.defined()) {
          key.push_back(kNone);
        } else if (!append_tensor(key, x, false)) {
          return std::nullopt;
        }
        args.push_back(x);
      }
    }
    for (int64_t at : call->gradient.options) {
      key.insert(key.end(), values[at].words.begin(), values[at].words.end());
      args.emplace_back();
    }
    for (const auto& words : call->gradient.constants) {
      key.insert(key.end(), words.begin(), words.end());
      args.emplace_back();
    }
    key.push_back(0);  // no gradient of this one is wanted
    const Entry* entry = call->gradient.by->find(key);
    if (!entry || !entry->program) return std::nullopt;
    RECORD_FUNCTION("sublight::" + call->gradient.by->name, std::vector<c10::IValue>());
    const auto found = run(*entry->program, args, {}, {});
    variable_list out(call->kinds.size());
    for (size_t at = 0; at < found.size(); ++at) {
      for (int64_t argument : call->gradient.gives[at]) out[argument] = found[at];
    }
    return out;
  }

  variable_list in_python(const variable_list& grads, const std::vector<at::Tensor>& kept) {
    py::gil_scoped_acquire gil;
    const auto cast = [](const at::Tensor& x) -> py::object { return x.defined() ? py::cast(x) : py::none(); };
    py::list given, tensors, others;
    for (const auto& x : grads) given.append(cast(x));
    for (const auto& x : kept) tensors.append(cast(x));
    for (const auto& value : values) {
      others.append(value.object ? py::reinterpret_borrow<py::object>(value.object) : py::none());
    }
    const auto found = py::handle(call->slow_backward)(given, tensors, others).cast<py::tuple>();
    variable_list out(call->kinds.size());
    for (size_t at = 0; at < out.size(); ++at) {
      if (!found[at].is_none()) out[at] = found[at].cast<at::Tensor>();
    }
    return out;
  }
};

struct Arguments {
  std::vector<at::Tensor> tensors;
  Key key;
  std::vector<double> free_floats;
  std::vector<int64_t> free_ints;
  bool wants_grad = false;
};

PyTypeObject* parameter_class = nullptr;

// false: Python must look at them
bool read(const Call& call, PyObject* const* args, size_t count, Arguments& into) {
  if (count != call.kinds.size() || somebody_listens()) return false;
  into.key.reserve(64);
  into.tensors.resize(count);
  const bool with_grad = at::GradMode::is_enabled();
  for (size_t at = 0; at < count; ++at) {
    PyObject* object = args[at];
    if (call.kinds[at] == 't' && object != Py_None) {
      if (!THPVariable_CheckExact(object) && Py_TYPE(object) != parameter_class) return false;
      into.tensors[at] = THPVariable_Unpack(object);
      if (!append_tensor(into.key, into.tensors[at], with_grad)) return false;
      into.wants_grad |= with_grad && into.tensors[at].requires_grad();
    } else if (call.kinds[at] == 'f') {
      into.free_floats.resize(count);
      into.free_ints.resize(count);
      if (PyFloat_Check(object)) {
        into.free_floats[at] = PyFloat_AS_DOUBLE(object);
      } else if (PyLong_Check(object)) {
        int overflow = 0;
        into.free_ints[at] = PyLong_AsLongLongAndOverflow(object, &overflow);
        into.free_floats[at] = static_cast<double>(into.free_ints[at]);
        if (overflow) return false;
      } else {
        return false;
      }
    } else if (!append_value(into.key, object)) {
      return false;
    }
  }
  into.key.push_back(with_grad && into.wants_grad);
  return true;
}

std::vector<at::Tensor> differentiated(Call& call, const Arguments& given, PyObject* const* args,
                                       std::vector<at::Tensor> outputs) {
  const auto node = new_node<Backward>(&call);
  node->set_next_edges(torch::autograd::collect_next_edges(given.tensors));
  node->values.resize(call.kinds.size());
  for (size_t at = 0; at < call.kinds.size(); ++at) {
    if (call.kinds[at] != 't') {
      append_value(node->values[at].words, args[at]);
      node->values[at].object = Py_NewRef(args[at]);
    }
  }
  const size_t results = call.results ? call.results : outputs.size();
  for (size_t at = 0; at < results; ++at) torch::autograd::set_history(outputs[at], node);
  node->saved.reserve(call.gradient.saves.size());
  for (const auto& [is_output, at] : call.gradient.saves) {
    const auto& x = is_output ? outputs[at] : given.tensors[at];
    node->saved.emplace_back(x, is_output && static_cast<size_t>(at) < results);
  }
  return outputs;
}

struct CallObject {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  Call* call;  // lives as long as the process: backward passes may come after everything else is gone
};

PyObject* vectorcall(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
  Call& call = *reinterpret_cast<CallObject*>(self)->call;
  const size_t count = PyVectorcall_NARGS(flags);
  HANDLE_TH_ERRORS
    if (!names) {
      Arguments given;
      if (read(call, args, count, given)) {
        const Entry* entry = call.find(given.key);
        if (entry && entry->python) return PyObject_Vectorcall(entry->python, args, flags, names);
        if (entry) {
          std::vector<at::Tensor> outputs;
          {
            RECORD_FUNCTION("sublight::" + call.name, std::vector<c10::IValue>(given.tensors.begin(), given.tensors.end()));
            at::AutoGradMode off(false);
            outputs = run(*entry->program, given.tensors, given.free_floats, given.free_ints);
          }
          if (given.wants_grad) outputs = differentiated(call, given, args, std::move(outputs));
          if (call.results && outputs.size() > static_cast<size_t>(call.results)) outputs.resize(call.results);
          return wrapped(outputs, call.is_tuple).release().ptr();
        }
      }
    }
  return PyObject_Vectorcall(call.slow, args, flags, names);
  END_HANDLE_TH_ERRORS
}

PyTypeObject call_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyObject* make(const std::string& name, const std::string& kinds, int64_t results, bool is_tuple, py::object slow) {
  auto* object = PyObject_New(CallObject, &call_type);
  if (!object) throw py::error_already_set();
  object->vectorcall = vectorcall;
  object->call = new Call;
  object->call->name = name;
  object->call->kinds = kinds;
  object->call->results = results;
  object->call->is_tuple = is_tuple;
  object->call->slow = slow.release().ptr();
  return reinterpret_cast<PyObject*>(object);
}

Call& call_of(const py::object& object) {
  TORCH_CHECK(Py_TYPE(object.ptr()) == &call_type, "not a call");
  return *reinterpret_cast<CallObject*>(object.ptr())->call;
}

Program program_of(const py::list& buffers, const py::list& launches, std::vector<int64_t> outputs) {
  Program program;
  program.outputs = std::move(outputs);
  for (const auto& item : buffers) {
    using Fields = std::tuple<std::vector<int64_t>, std::vector<int64_t>, py::object, bool>;
    const auto [shape, strides, dtype, is_zero] = item.cast<Fields>();
    const auto* kind = reinterpret_cast<THPDtype*>(dtype.ptr());
    program.buffers.push_back({shape, strides, kind->scalar_type, is_zero});
  }
  for (const auto& item : launches) {
    const auto fields = item.cast<py::dict>();
    Launch launch;
    if (fields.contains("python")) {
      launch.python = py::object(fields["python"]).release().ptr();
    } else {
      launch.function = fields["function"].cast<uint64_t>();
      const auto grid = fields["grid"].cast<std::vector<unsigned>>();
      for (size_t at = 0; at < 3 && at < grid.size(); ++at) launch.grid[at] = grid[at];
      launch.threads = fields["threads"].cast<unsigned>();
      launch.shared_bytes = fields["shared_bytes"].cast<unsigned>();
    }
    for (const auto& each : fields["parameters"].cast<py::list>()) {
      const auto [kind, index, type] = each.cast<std::tuple<std::string, py::object, std::string>>();
      Parameter parameter{Parameter::kTensor, 0, 0};
      if (kind == "tensor") {
        parameter.index = index.cast<int64_t>();
      } else if (kind == "free") {
        parameter.kind = Parameter::kFree;
        parameter.index = index.cast<int64_t>();
        parameter.is_float32 = type == "fp32";
        parameter.is_float64 = type == "fp64";
      } else {
        parameter.kind = Parameter::kLiteral;
        if (type == "fp32") {
          const float value = index.cast<float>();
          std::memcpy(&parameter.bits, &value, sizeof value);
        } else if (type == "fp64") {
          const double value = index.cast<double>();
          std::memcpy(&parameter.bits, &value, sizeof value);
        } else {
          parameter.bits = static_cast<uint64_t>(index.cast<int64_t>());
        }
      }
      launch.parameters.push_back(parameter);
    }
    program.launches.push_back(std::move(launch));
  }
  return program;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  call_type.tp_name = "sublight.Call";
  call_type.tp_basicsize = sizeof(CallObject);
  call_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  call_type.tp_vectorcall_offset = offsetof(CallObject, vectorcall);
  call_type.tp_call = PyVectorcall_Call;
  if (PyType_Ready(&call_type) < 0) throw py::error_already_set();
  parameter_class = reinterpret_cast<PyTypeObject*>(
      py::object(py::module_::import("torch.nn").attr("Parameter")).release().ptr());

  module.def("call", [](const std::string& name, const std::string& kinds, int64_t results, bool is_tuple,
                        py::object slow) {
    return py::reinterpret_steal<py::object>(make(name, kinds, results, is_tuple, std::move(slow)));
  });
  // the op `by` takes the gradients of the results, then what is saved, then the options
  module.def("differentiate", [](py::object of, py::object by, std::vector<std::pair<bool, int64_t>> saves,
                                 std::vector<std::vector<int64_t>> gives, std::vector<int64_t> options,
                                 const py::list& constants, py::object slow_backward) {
    Call& call = call_of(of);
    std::vector<Key> words(constants.size());
    for (size_t at = 0; at < words.size(); ++at) {
      TORCH_CHECK(append_value(words[at], py::object(constants[at]).ptr()), "a constant of no kind that keys have");
    }
    call.gradient = {&call_of(by), std::move(saves), std::move(gives), std::move(options), std::move(words)};
    call.slow_backward = slow_backward.release().ptr();
  });
  // true: calls with arguments like these run this program from now on
  module.def("teach", [](py::object of, py::tuple args, const py::list& buffers, const py::list& launches,
                         std::vector<int64_t> outputs) {
    Call& call = call_of(of);
    Arguments given;
    if (!read(call, PySequence_Fast_ITEMS(args.ptr()), args.size(), given)) return false;
    if (given.wants_grad && !call.gradient.by) return false;
    auto program = std::make_shared<const Program>(program_of(buffers, launches, std::move(outputs)));
    std::unique_lock lock(call.mutex);
    call.entries.try_emplace(given.key, Entry{std::move(program)});
    return true;
  });
  // true: calls with arguments like these go to this function from now on
  module.def("delegate", [](py::object of, py::tuple args, py::object function) {
    Call& call = call_of(of);
    Arguments given;
    if (!read(call, PySequence_Fast_ITEMS(args.ptr()), args.size(), given)) return false;
    std::unique_lock lock(call.mutex);
    call.entries.try_emplace(given.key, Entry{nullptr, function.release().ptr()});
    return true;
  });
  module.def("pause", [](int more) { pauses += more; });
  module.def("watch", [](py::list calls) { hooks.push_back(calls.release().ptr()); });
  module.def("known", [](py::object of) { return call_of(of).entries.size(); });
}
