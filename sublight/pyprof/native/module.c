/* The module: the sampler's functions and the tracer's. */
#include "native.h"

/* No code in Python runs for this: it would be traced, and could let other threads run. */
PyObject *thread_name(PyObject *active, unsigned long ident) {
    PyObject *key = PyLong_FromUnsignedLong(ident);
    PyObject *thread = key && PyDict_Check(active) ? PyDict_GetItemWithError(active, key) : NULL;
    PyObject *name = thread ? PyObject_GetAttrString(thread, "_name") : NULL;
    Py_XDECREF(key);
    PyErr_Clear();
    return name;
}

static PyMethodDef sampler_methods[] = {
    {"sample_start", sampler_start, METH_VARARGS, NULL},
    {"sample_stop", sampler_stop, METH_NOARGS, NULL},
    {"sample_pause", sampler_pause, METH_NOARGS, NULL},
    {"sample_resume", sampler_resume, METH_NOARGS, NULL},
    {"sample_abandon", sampler_abandon, METH_NOARGS, NULL},
    {"sample_seen", sampler_seen, METH_NOARGS, NULL},
    {"before_termination", before_termination, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "sublight_pyprof", NULL, -1, sampler_methods};

PyMODINIT_FUNC PyInit_sublight_pyprof(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddFunctions(module, tracer_methods)) Py_CLEAR(module);
    return module;
}
