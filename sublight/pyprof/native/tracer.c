/* Counts and times every call: a tree of calls for each thread.

   Before Python 3.12 a hook in C is called by the interpreter (PyEval_SetProfile); from 3.12 on `sys.monitoring` calls
   the functions below, so that code it does not watch runs at full speed. A call adds one to its node, and two readings
   of the clock to its time. A generator is called when its body begins, and resumed each time that it goes on. */
#include "native.h"

#include <opcode.h>
#include <stddef.h>
#include <string.h>

#define NOT_YET -1 /* no trace's number: the calls of a thread do not count, yet or any more */
#define FIRST_ROOM 256 /* calls under way in a thread, at first */
#define MORE_EVENTS 10000 /* for the calls that were under way when the wanted number of calls had been kept */
#define MOST_NODES 2000000 /* of the trees, all threads: what comes later is counted below the thread's root */

typedef struct Function { const void *key; PyObject *thing; struct Function *next; int number; } Function;
typedef struct Node {
    const void *key; struct Node *parent, *last; uint64_t calls, resumes; int64_t total; /* what each call touches */
    Function *function; int number;
} Node;
typedef struct { Node *node; int64_t start; } Open;
typedef struct Thread {
    Open *top, *end; int counts; /* the last call under way, its room's end; the trace that its calls are counted in */
    Open *open; /* the first is no call: it holds the root */
    Node *root, **slots; size_t slot_count, node_count;
    PyObject *name; struct Thread *next; uint64_t lost; unsigned long ident; int generation, number;
} Thread;
typedef struct { int thread, node; int64_t start, end; } Event;

static struct {
    Function **functions; int function_slots, function_count;
    Thread *threads; int thread_count;
    size_t nodes;
    Event *events; size_t event_count, most_events; int64_t full_at; /* when so many were there */
    int timed, builtins, generation, on; /* on: the generation, 0 where no call counts */
    int64_t began, began_ns, ended, ended_ns; int ticks; /* whether the clock is the processor's own counter */
    PyObject *active; /* threading's threads, by ident */
    /* The main thread counts inside the frames of the program's files: what calls them is not the program. */
    int inside, taken_away;
    unsigned long main_ident;
    PyObject *files, *at_begin; /* of the program, and of its packages; called with their code when it begins */
    const void *program;
} T;
static __thread Thread *mine __attribute__((tls_model("initial-exec"))); /* of a trace that is over, after `start` */
static Node no_node; /* the last child of a node that has none: its key is no function's */

#define RARE(condition) __builtin_expect(!!(condition), 0)

static int64_t ns_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static inline int64_t now(void) {
#if defined(__x86_64__)
    if (T.ticks) return (int64_t)__builtin_ia32_rdtsc();
#endif
    return ns_now();
}

static Function *function_of(const void *key) {
    if (!T.functions) {
        T.function_slots = 1 << 14;
        T.functions = calloc(T.function_slots, sizeof(Function *));
        if (!T.functions) return NULL;
    }
    size_t at = ((uintptr_t)key >> 4) * 0x9E3779B97F4A7C15ULL >> 50;
    for (Function *f = T.functions[at]; f; f = f->next)
        if (f->key == key) return f;
    Function *f = calloc(1, sizeof(Function));
    if (!f) return NULL;
    *f = (Function){key, NULL, T.functions[at], T.function_count++};
    T.functions[at] = f;
    return f;
}

static Thread *begin_thread(void) {
    Thread *t = calloc(1, sizeof(Thread));
    Node *root = calloc(1, sizeof(Node));
    Open *open = malloc(FIRST_ROOM * sizeof(Open));
    if (!t || !root || !open) return free(t), free(root), free(open), NULL;
    *open = (Open){root, 0};
    root->last = &no_node;
    t->root = root, t->open = t->top = open, t->end = open + FIRST_ROOM;
    t->ident = PyThread_get_thread_ident();
    t->root->number = (int)t->node_count++;
    t->number = T.thread_count++;
    t->counts = NOT_YET;
    t->next = T.threads, T.threads = t;
    t->generation = T.generation;
    mine = t;
    return t;
}

static int begins(PyObject *thing) {
    if (!PyCode_Check(thing)) return 0;
    PyCodeObject *code = (PyCodeObject *)thing;
    if (PyUnicode_CompareWithASCIIString(code->co_name, "<module>") || PySequence_Contains(T.files, code->co_filename) != 1) return 0;
    T.program = code;
    if (T.at_begin != Py_None) {
        PyObject *done = PyObject_CallOneArg(T.at_begin, thing);
        if (!done) PyErr_Clear();
        Py_XDECREF(done);
    }
    T.inside = 1;
    return 1;
}

/* The thread whose calls count from now on; none where the program has not begun, or is over. */
static Thread *admitted(PyObject *thing) {
    if (!T.on) return NULL;
    Thread *t = mine && mine->generation == T.generation ? mine : begin_thread();
    if (!t) return NULL;
    if (!T.inside && t->ident == T.main_ident && !begins(thing)) return NULL;
    t->counts = T.generation;
    return t;
}

static int grow(Thread *t) {
    size_t count = t->slot_count ? 2 * t->slot_count : 1024;
    Node **slots = calloc(count, sizeof(Node *));
    if (!slots) return -1;
    for (size_t i = 0; i < t->slot_count; i++) {
        Node *n = t->slots[i];
        if (!n) continue;
        size_t at = (((uintptr_t)n->parent >> 4) * 31 + ((uintptr_t)n->key >> 4)) * 0x9E3779B97F4A7C15ULL >> 20 & (count - 1);
        while (slots[at]) at = (at + 1) & (count - 1);
        slots[at] = n;
    }
    free(t->slots);
    t->slots = slots, t->slot_count = count;
    return 0;
}

static Node *child_of(Thread *t, Node *parent, const void *key, PyObject *(*name)(PyObject *), PyObject *thing) {
    if (2 * t->node_count >= t->slot_count && grow(t)) return NULL;
    if (T.nodes >= MOST_NODES) parent = t->root;
    size_t at = (((uintptr_t)parent >> 4) * 31 + ((uintptr_t)key >> 4)) * 0x9E3779B97F4A7C15ULL >> 20 & (t->slot_count - 1);
    for (; t->slots[at]; at = (at + 1) & (t->slot_count - 1))
        if (t->slots[at]->parent == parent && t->slots[at]->key == key) return parent->last = t->slots[at];
    Function *f = function_of(key);
    Node *n = calloc(1, sizeof(Node));
    if (!f || !n) return free(n), NULL;
    if (!f->thing) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        f->thing = name(thing);
        PyErr_Restore(type, value, trace);
    }
    if (!t->name && T.active) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        t->name = thread_name(T.active, t->ident);
        PyErr_Restore(type, value, trace);
    }
    n->key = key, n->function = f, n->parent = parent, n->last = &no_node, n->number = (int)t->node_count++;
    T.nodes++;
    t->slots[at] = n;
    return parent->last = n;
}

static PyObject *same(PyObject *thing) { return Py_NewRef(thing); }

static int more_room(Thread *t) {
    size_t used = t->end - t->open;
    Open *more = realloc(t->open, 2 * used * sizeof(Open));
    if (!more) return -1;
    t->open = more, t->top = more + used - 1, t->end = more + 2 * used;
    return 0;
}

static inline void enter(const void *key, PyObject *(*name)(PyObject *), PyObject *thing, int resumed) {
    Thread *t = mine;
    if (RARE(!t || t->counts != T.on) && !(t = admitted(thing))) return;
    Node *parent = t->top->node, *n = parent->last;
    if (RARE(n->key != key) && !(n = child_of(t, parent, key, name, thing))) return;
    if (resumed) n->resumes++;
    else n->calls++;
    if (!T.timed || (RARE(t->top + 1 == t->end) && more_room(t))) return;
    *++t->top = (Open){n, now()};
}

static inline void close_one(Thread *t, int64_t at) {
    Open *o = t->top--;
    o->node->total += at - o->start;
    if (T.event_count < T.most_events || RARE(o->start < T.full_at && T.event_count < T.most_events + MORE_EVENTS)) {
        T.events[T.event_count++] = (Event){t->number, o->node->number, o->start, at};
        if (T.event_count == T.most_events) T.full_at = at;
    }
}

/* Another call than the last one ends: those above it did, unseen. Whether it is under way. */
static int close_above(Thread *t, const void *key, int64_t at) {
    Open *o = t->top;
    while (o > t->open && o->node->key != key) o--;
    t->lost++;
    if (o == t->open) return 0; /* a call that we did not see begin */
    while (t->top > o) close_one(t, at);
    return 1;
}

static inline void leave(const void *key) {
    Thread *t = mine;
    if (RARE(!t || t->counts != T.on)) return; /* it was called before we began */
    if (t->top > t->open) {
        int64_t at = now();
        if (RARE(t->top->node->key != key) && !close_above(t, key, at)) return;
        close_one(t, at);
    }
    if (RARE(t->top == t->open && key == T.program && T.inside)) T.inside = 0, t->counts = NOT_YET;
}

/* A builtin's name, with its module or its class; the object itself is not kept: it may hold much alive. */
static PyObject *builtin_name(PyObject *callable) {
    const char *name, *owner = NULL;
    PyObject *self = NULL;
    PyMethodDef *method;
    if (Py_IS_TYPE(callable, &PyMethodDescr_Type)) {
        method = ((PyMethodDescrObject *)callable)->d_method;
        owner = ((PyDescrObject *)callable)->d_type->tp_name;
    } else {
        method = ((PyCFunctionObject *)callable)->m_ml;
        self = ((PyCFunctionObject *)callable)->m_self;
    }
    name = method->ml_name;
    if (self && PyModule_Check(self)) owner = PyModule_GetName(self);
    else if (self) {
        PyTypeObject *type = PyType_Check(self) ? (PyTypeObject *)self : Py_TYPE(self);
        owner = type->tp_name;
        for (Py_ssize_t i = 0; type->tp_mro && i < PyTuple_GET_SIZE(type->tp_mro); i++) { /* the class that has it */
            PyTypeObject *base = (PyTypeObject *)PyTuple_GET_ITEM(type->tp_mro, i);
            for (PyMethodDef *m = base->tp_methods; m && m->ml_name; m++)
                if (m == method) owner = base->tp_name;
        }
    }
    PyErr_Clear();
    return owner ? PyUnicode_FromFormat("%s.%s", owner, name) : PyUnicode_FromString(name);
}

static inline const void *builtin_key(PyObject *callable) {
    if (PyCFunction_Check(callable)) return ((PyCFunctionObject *)callable)->m_ml;
    if (Py_IS_TYPE(callable, &PyMethodDescr_Type)) return ((PyMethodDescrObject *)callable)->d_method;
    return NULL;
}

#if PY_VERSION_HEX < 0x030C0000
#define SUSPENDS (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR)

/* Whether a generator's frame goes on: it does not stand at the RESUME 0 that begins its body. */
static int goes_on(PyFrameObject *frame, PyCodeObject *code) {
    int at = PyFrame_GetLasti(frame);
    const unsigned char *unit = (const unsigned char *)code->co_code_adaptive + at;
    return at < 0 || !((unit[0] == RESUME || unit[0] == RESUME_QUICK) && unit[1] == 0);
}

static int hook(PyObject *self, PyFrameObject *frame, int what, PyObject *argument) {
    if (!T.on) return 0;
    if (what == PyTrace_CALL || what == PyTrace_RETURN) {
        PyCodeObject *code = PyFrame_GetCode(frame);
        if (what == PyTrace_CALL) enter(code, same, (PyObject *)code, code->co_flags & SUSPENDS && goes_on(frame, code));
        else if (T.timed || code == T.program) leave(code);
        Py_DECREF(code);
    } else if (T.builtins && argument) {
        const void *key = builtin_key(argument);
        if (!key) return 0;
        if (what == PyTrace_C_CALL) enter(key, builtin_name, argument, 0);
        else if (T.timed && (what == PyTrace_C_RETURN || what == PyTrace_C_EXCEPTION)) leave(key);
    }
    return 0;
}

/* The profile function of a new thread, for its first event: from then on C does it. */
static PyObject *take_thread(PyObject *self, PyObject *args) {
    PyObject *frame, *argument;
    const char *event;
    if (!PyArg_ParseTuple(args, "OsO", &frame, &event, &argument)) return NULL;
    PyEval_SetProfile(T.on ? hook : NULL, NULL);
    if (T.on && !strcmp(event, "call")) hook(NULL, (PyFrameObject *)frame, PyTrace_CALL, Py_None);
    Py_RETURN_NONE;
}

/* Before `sys.setprofile` or a profiler in C puts another function in the place of ours, in whichever thread. */
static int on_audit(const char *event, PyObject *args, void *unused) {
    if (T.on && !strcmp(event, "sys.setprofile") && PyThreadState_Get()->c_profilefunc == hook) T.taken_away = 1;
    return 0;
}

static PyObject *set_hook(PyObject *self, PyObject *wanted) {
    static int audits; /* such a hook cannot be taken out again */
    if (!audits && PySys_AddAuditHook(on_audit, NULL)) return NULL;
    audits = 1;
    PyEval_SetProfile(PyObject_IsTrue(wanted) ? hook : NULL, NULL);
    Py_RETURN_NONE;
}

static PyObject *was_taken_away(PyObject *self, PyObject *unused) { return PyBool_FromLong(T.taken_away); }
#else
/* What `sys.monitoring` calls, each an object of a type of its own: a module's function would pass through a wrapper that
   checks for keywords and depth, which costs as much as all that is done here. */
typedef struct { PyObject_HEAD vectorcallfunc call; } Callback;
static PyTypeObject callback_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "sublight_pyprof.callback",
    .tp_basicsize = sizeof(Callback),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Callback, call),
    .tp_call = PyVectorcall_Call,
};

#define EVENT(name, least, body)                                                                      \
    static PyObject *name(PyObject *self, PyObject *const *args, size_t count, PyObject *keywords) {  \
        if (PyVectorcall_NARGS(count) >= least) { body; }                                             \
        Py_RETURN_NONE;                                                                               \
    }
EVENT(on_start, 1, enter(args[0], same, args[0], 0))
EVENT(on_resume, 1, enter(args[0], same, args[0], 1))
EVENT(on_return, 1, leave(args[0]))
EVENT(on_call, 3, const void *key = builtin_key(args[2]); if (key) enter(key, builtin_name, args[2], 0))
EVENT(on_builtin_return, 3, const void *key = builtin_key(args[2]); if (key) leave(key))

static int add_callbacks(PyObject *module) {
    static const struct { const char *name; vectorcallfunc call; } all[] = {
        {"on_start", on_start}, {"on_resume", on_resume}, {"on_return", on_return},
        {"on_call", on_call}, {"on_builtin_return", on_builtin_return},
    };
    if (PyType_Ready(&callback_type)) return -1;
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        Callback *one = PyObject_New(Callback, &callback_type);
        if (!one) return -1;
        one->call = all[i].call;
        int failed = PyModule_AddObjectRef(module, all[i].name, (PyObject *)one);
        Py_DECREF(one);
        if (failed) return -1;
    }
    return 0;
}
#endif

static PyObject *start(PyObject *self, PyObject *args) {
    PyObject *active, *files, *at_begin;
    Py_ssize_t events;
    if (!PyArg_ParseTuple(args, "ppnpOO!O", &T.timed, &T.builtins, &events, &T.ticks, &active, &PyTuple_Type, &files, &at_begin))
        return NULL;
    T.generation++;
    T.threads = NULL, T.thread_count = 0, T.nodes = 0; /* what an earlier trace, or a fork's parent, left is let go */
    Py_INCREF(active);
    Py_XSETREF(T.active, active);
    Py_INCREF(files), Py_INCREF(at_begin);
    Py_XSETREF(T.files, files);
    Py_XSETREF(T.at_begin, at_begin);
    T.inside = !PyTuple_GET_SIZE(files), T.taken_away = 0;
    T.main_ident = PyThread_get_thread_ident();
    T.program = NULL;
    free(T.events);
    size_t room = (events + MORE_EVENTS) * sizeof(Event);
    T.events = events && T.timed ? malloc(room) : NULL;
    T.event_count = 0, T.most_events = T.events ? events : 0, T.full_at = INT64_MIN;
    if (T.events) memset(T.events, 0, room); /* its pages are there before the first call that is timed */
    T.began = now(), T.began_ns = ns_now();
    T.on = T.generation;
    Py_RETURN_NONE;
}

static PyObject *stop(PyObject *self, PyObject *unused) {
    if (T.on) {
        T.on = 0;
        T.ended = now(), T.ended_ns = ns_now();
        for (Thread *t = T.threads; t; t = t->next)
            while (t->top > t->open) close_one(t, T.ended); /* calls that are under way */
    }
    Py_RETURN_NONE;
}

/* ([(name, number, [(parent, function, calls, resumes, total_ns)], lost)], functions, [(thread, node, start_ns, end_ns)]) */
static PyObject *seen(PyObject *self, PyObject *unused) {
    double scale = T.ticks && T.ended > T.began ? (double)(T.ended_ns - T.began_ns) / (double)(T.ended - T.began) : 1.0;
    PyObject *threads = PyList_New(0), *functions = PyList_New(T.function_count), *events = PyList_New(T.event_count);
    if (!threads || !functions || !events) return NULL;
    for (int i = 0; i < T.function_slots; i++)
        for (Function *f = T.functions[i]; f; f = f->next)
            PyList_SET_ITEM(functions, f->number, Py_NewRef(f->thing ? f->thing : Py_None));
    for (Thread *t = T.threads; t; t = t->next) {
        PyObject *nodes = PyList_New(t->node_count);
        if (!nodes) return NULL;
        PyList_SET_ITEM(nodes, 0, Py_BuildValue("(iiKKL)", -1, -1, 0ULL, 0ULL, 0LL));
        for (size_t i = 0; i < t->slot_count; i++) {
            Node *n = t->slots[i];
            if (n)
                PyList_SET_ITEM(nodes, n->number,
                                Py_BuildValue("(iiKKL)", n->parent->number, n->function->number, n->calls, n->resumes,
                                              (long long)(n->total * scale)));
        }
        PyObject *one = Py_BuildValue("(OkNK)", t->name ? t->name : Py_None, (unsigned long)t->number, nodes, t->lost);
        if (!one || PyList_Append(threads, one)) return NULL;
        Py_DECREF(one);
    }
    for (size_t i = 0; i < T.event_count; i++) {
        Event *e = &T.events[i];
        PyList_SET_ITEM(events, i, Py_BuildValue("(iiLL)", e->thread, e->node, (long long)((e->start - T.began) * scale),
                                                 (long long)((e->end - T.began) * scale)));
    }
    return Py_BuildValue("(NNNL)", threads, functions, events, (long long)(T.ended_ns - T.began_ns));
}

static PyMethodDef methods[] = {
    {"trace_start", start, METH_VARARGS, NULL},
    {"trace_stop", stop, METH_NOARGS, NULL},
    {"trace_seen", seen, METH_NOARGS, NULL},
#if PY_VERSION_HEX < 0x030C0000
    {"trace_hook", set_hook, METH_O, NULL},
    {"trace_was_taken_away", was_taken_away, METH_NOARGS, NULL},
    {"trace_take_thread", take_thread, METH_VARARGS, NULL},
#endif
    {NULL, NULL, 0, NULL},
};

int add_tracer(PyObject *module) {
#if PY_VERSION_HEX >= 0x030C0000
    if (add_callbacks(module)) return -1;
#endif
    return PyModule_AddFunctions(module, methods);
}
