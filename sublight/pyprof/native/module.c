/* The module: the sampler's functions and the tracer's. */
#define _GNU_SOURCE
#include "native.h"

#include <sys/syscall.h>
#include <unistd.h>

#define PATIENCE 1000 /* times 20 us, for a thread that has ended to be gone */

/* No code in Python runs for this: it would be traced, and could let other threads run. */
PyObject *thread_name(PyObject *active, unsigned long ident) {
    PyObject *key = PyLong_FromUnsignedLong(ident);
    PyObject *thread = key && PyDict_Check(active) ? PyDict_GetItemWithError(active, key) : NULL;
    PyObject *name = thread ? PyObject_GetAttrString(thread, "_name") : NULL;
    Py_XDECREF(key);
    PyErr_Clear();
    return name;
}

void join_thread(pthread_t thread, long tid) {
    pthread_join(thread, NULL);
    for (int i = 0; i < PATIENCE && !syscall(SYS_tgkill, getpid(), tid, 0); i++) usleep(20);
}

static PyObject *to_do; /* (what is called behind a fork, the file of the hook that asked for it) */

static int do_it(void) {
    PyObject *what = to_do, *done = what ? PyObject_CallNoArgs(PyTuple_GET_ITEM(what, 0)) : NULL;
    to_do = NULL;
    if (!done) PyErr_Clear();
    Py_XDECREF(done), Py_XDECREF(what);
    return 0;
}

/* At a safe point of the main thread: the first that is not in that hook. */
static int behind_fork(void *unused) {
    PyFrameObject *frame = PyEval_GetFrame();
    PyCodeObject *code = frame ? PyFrame_GetCode(frame) : NULL;
    int is_hook = code && to_do && !PyUnicode_Compare(code->co_filename, PyTuple_GET_ITEM(to_do, 1));
    Py_XDECREF(code);
    return is_hook && !Py_AddPendingCall(behind_fork, NULL) ? 0 : do_it();
}

/* (function, file): Python 3.13 counts a parent's threads, and may warn, after its hooks have run. The main thread's next
   safe point is near; where another thread forks it may be far. */
static PyObject *after_fork(PyObject *self, PyObject *args) {
    Py_XSETREF(to_do, Py_NewRef(args));
    int is_main = syscall(SYS_gettid) == getpid();
    if (PY_VERSION_HEX < 0x030D0000 || !is_main || Py_AddPendingCall(behind_fork, NULL)) do_it();
    Py_RETURN_NONE;
}

static PyMethodDef sampler_methods[] = {
    {"sample_start", sampler_start, METH_VARARGS, NULL},
    {"sample_stop", sampler_stop, METH_NOARGS, NULL},
    {"sample_pause", sampler_pause, METH_NOARGS, NULL},
    {"sample_resume", sampler_resume, METH_NOARGS, NULL},
    {"sample_abandon", sampler_abandon, METH_NOARGS, NULL},
    {"sample_seen", sampler_seen, METH_NOARGS, NULL},
    {"before_termination", before_termination, METH_O, NULL},
    {"after_fork", after_fork, METH_VARARGS, NULL},
    {"termination_pause", termination_pause, METH_NOARGS, NULL},
    {"termination_resume", termination_resume, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "sublight_pyprof", NULL, -1, sampler_methods};

PyMODINIT_FUNC PyInit_sublight_pyprof(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module && add_tracer(module)) Py_CLEAR(module);
    return module;
}
