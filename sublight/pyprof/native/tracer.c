/* Counts and times every call: a tree of calls for each thread.

   Before Python 3.12 a hook in C is called by the interpreter (PyEval_SetProfile); from 3.12 on `sys.monitoring` calls
   the functions below, so that code it does not watch runs at full speed. A call adds one to its node, and two readings
   of the clock to its time. A generator is called when its body begins, and resumed each time that it goes on. */
#include "native.h"

#include <opcode.h>
#include <string.h>

#define MOST_NODES 2000000 /* of the trees, all threads: what comes later is counted below the thread's root */

typedef struct Function { const void *key; PyObject *thing; struct Function *next; int number; } Function;
typedef struct Node { Function *function; struct Node *parent, *last; uint64_t calls, resumes; int64_t total; int number; } Node;
typedef struct { Node *node; int64_t start; } Open;
typedef struct Thread {
    Node *root; Open *open; int depth, room;
    Node **slots; size_t slot_count, node_count;
    PyObject *name; struct Thread *next; uint64_t lost; unsigned long ident; int generation, number;
} Thread;
typedef struct { int thread, node; int64_t start, end; } Event;

static struct {
    Function **functions; int function_slots, function_count;
    Thread *threads; int thread_count;
    size_t nodes;
    Event *events; size_t event_count, most_events;
    int timed, builtins, on, generation;
    int64_t began, began_ns, ended, ended_ns; int ticks; /* whether the clock is the processor's own counter */
    PyObject *active; /* threading's threads, by ident */
    /* The main thread counts from the program's first frame to its end: what calls it is not the program. */
    enum { BEFORE, INSIDE, AFTER } main_stands;
    unsigned long main_ident;
    PyObject *file, *at_begin; /* of the program; called with its code when it begins */
    const void *program;
} T;
static __thread Thread *mine __attribute__((tls_model("initial-exec"))); /* of a trace that is over, after `start` */

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
    if (!t || !(t->root = calloc(1, sizeof(Node)))) return free(t), NULL;
    t->ident = PyThread_get_thread_ident();
    t->root->number = (int)t->node_count++;
    t->number = T.thread_count++;
    t->next = T.threads, T.threads = t;
    t->generation = T.generation;
    mine = t;
    return t;
}

static int begins(PyObject *thing) {
    if (!PyCode_Check(thing)) return 0;
    PyCodeObject *code = (PyCodeObject *)thing;
    if (PyUnicode_Compare(code->co_filename, T.file) || PyUnicode_CompareWithASCIIString(code->co_name, "<module>")) return 0;
    T.program = code;
    if (T.at_begin != Py_None) {
        PyObject *done = PyObject_CallOneArg(T.at_begin, thing);
        if (!done) PyErr_Clear();
        Py_XDECREF(done);
    }
    T.main_stands = INSIDE;
    return 1;
}

static inline Thread *this_thread(void) {
    Thread *t = mine;
    return t && t->generation == T.generation ? t : begin_thread();
}

static int grow(Thread *t) {
    size_t count = t->slot_count ? 2 * t->slot_count : 1024;
    Node **slots = calloc(count, sizeof(Node *));
    if (!slots) return -1;
    for (size_t i = 0; i < t->slot_count; i++) {
        Node *n = t->slots[i];
        if (!n) continue;
        size_t at = (((uintptr_t)n->parent >> 4) * 31 + ((uintptr_t)n->function->key >> 4)) * 0x9E3779B97F4A7C15ULL >> 20 & (count - 1);
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
        if (t->slots[at]->parent == parent && t->slots[at]->function->key == key) return parent->last = t->slots[at];
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
    n->function = f, n->parent = parent, n->number = (int)t->node_count++;
    T.nodes++;
    t->slots[at] = n;
    return parent->last = n;
}

static PyObject *same(PyObject *thing) { return Py_NewRef(thing); }

static inline void enter(const void *key, PyObject *(*name)(PyObject *), PyObject *thing, int resumed) {
    Thread *t = this_thread();
    if (!t) return;
    if (T.main_stands != INSIDE && t->ident == T.main_ident && !(T.main_stands == BEFORE && begins(thing))) return;
    Node *parent = t->depth ? t->open[t->depth - 1].node : t->root, *n = parent->last;
    if ((!n || n->function->key != key) && !(n = child_of(t, parent, key, name, thing))) return;
    if (resumed) n->resumes++;
    else n->calls++;
    if (!T.timed) return;
    if (t->depth == t->room) {
        int room = t->room ? 2 * t->room : 256;
        Open *more = realloc(t->open, room * sizeof(Open));
        if (!more) return;
        t->open = more, t->room = room;
    }
    t->open[t->depth++] = (Open){n, now()};
}

static void close_one(Thread *t, int64_t at) {
    Open *o = &t->open[--t->depth];
    o->node->total += at - o->start;
    if (T.event_count < T.most_events)
        T.events[T.event_count++] = (Event){t->number, o->node->number, o->start, at};
}

static inline void leave(const void *key) {
    Thread *t = this_thread();
    if (key == T.program && T.main_stands == INSIDE) T.main_stands = AFTER;
    if (!t || !t->depth) return; /* it was called before we began */
    int64_t at = now();
    if (t->open[t->depth - 1].node->function->key != key) {
        int depth = t->depth;
        while (depth && t->open[depth - 1].node->function->key != key) depth--;
        t->lost++;
        if (!depth) return; /* a call that we did not see begin */
        while (t->depth > depth) close_one(t, at);
    }
    close_one(t, at);
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

static PyObject *set_hook(PyObject *self, PyObject *wanted) {
    PyEval_SetProfile(PyObject_IsTrue(wanted) ? hook : NULL, NULL);
    Py_RETURN_NONE;
}

static PyObject *has_hook(PyObject *self, PyObject *unused) {
    return PyBool_FromLong(PyThreadState_Get()->c_profilefunc == hook);
}
#else
#define EVENT(name, body)                                                                   \
    static PyObject *name(PyObject *self, PyObject *const *args, Py_ssize_t count) {       \
        if (T.on && count >= 2) { body; }                                                   \
        Py_RETURN_NONE;                                                                     \
    }
EVENT(on_start, enter(args[0], same, args[0], 0))
EVENT(on_resume, enter(args[0], same, args[0], 1))
EVENT(on_return, leave(args[0]))
EVENT(on_call, const void *key = count > 2 ? builtin_key(args[2]) : NULL; if (key) enter(key, builtin_name, args[2], 0))
EVENT(on_builtin_return, const void *key = count > 2 ? builtin_key(args[2]) : NULL; if (key) leave(key))
#endif

static PyObject *start(PyObject *self, PyObject *args) {
    PyObject *active, *file, *at_begin;
    Py_ssize_t events;
    if (!PyArg_ParseTuple(args, "ppnpOUO", &T.timed, &T.builtins, &events, &T.ticks, &active, &file, &at_begin)) return NULL;
    T.generation++;
    T.threads = NULL, T.thread_count = 0, T.nodes = 0; /* what an earlier trace, or a fork's parent, left is let go */
    Py_INCREF(active);
    Py_XSETREF(T.active, active);
    Py_INCREF(file), Py_INCREF(at_begin);
    Py_XSETREF(T.file, file);
    Py_XSETREF(T.at_begin, at_begin);
    T.main_stands = PyUnicode_GET_LENGTH(file) ? BEFORE : INSIDE;
    T.main_ident = PyThread_get_thread_ident();
    T.program = NULL;
    free(T.events);
    T.events = events && T.timed ? malloc(events * sizeof(Event)) : NULL;
    T.event_count = 0, T.most_events = T.events ? events : 0;
    if (T.events) memset(T.events, 0, events * sizeof(Event)); /* its pages are there before the first call that is timed */
    T.began = now(), T.began_ns = ns_now();
    T.on = 1;
    Py_RETURN_NONE;
}

static PyObject *stop(PyObject *self, PyObject *unused) {
    if (T.on) {
        T.on = 0;
        T.ended = now(), T.ended_ns = ns_now();
        for (Thread *t = T.threads; t; t = t->next)
            while (t->depth) close_one(t, T.ended); /* calls that are under way */
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

PyMethodDef tracer_methods[] = {
    {"trace_start", start, METH_VARARGS, NULL},
    {"trace_stop", stop, METH_NOARGS, NULL},
    {"trace_seen", seen, METH_NOARGS, NULL},
#if PY_VERSION_HEX < 0x030C0000
    {"trace_hook", set_hook, METH_O, NULL},
    {"trace_has_hook", has_hook, METH_NOARGS, NULL},
    {"trace_take_thread", take_thread, METH_VARARGS, NULL},
#else
    {"on_start", (PyCFunction)(void (*)(void))on_start, METH_FASTCALL, NULL},
    {"on_resume", (PyCFunction)(void (*)(void))on_resume, METH_FASTCALL, NULL},
    {"on_return", (PyCFunction)(void (*)(void))on_return, METH_FASTCALL, NULL},
    {"on_call", (PyCFunction)(void (*)(void))on_call, METH_FASTCALL, NULL},
    {"on_builtin_return", (PyCFunction)(void (*)(void))on_builtin_return, METH_FASTCALL, NULL},
#endif
    {NULL, NULL, 0, NULL},
};
