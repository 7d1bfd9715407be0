/* A child that is told to end by SIGTERM, as a pool's workers are, writes what it recorded first; then it ends by that
   signal as it would have. Python does not know of this: for it SIGTERM has its default, and may be given a handler. */
#define _GNU_SOURCE
#include "native.h"

#include <semaphore.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PATIENCE_S 3 /* for the interpreter's lock, which may never come */

static sem_t wake;
static volatile sig_atomic_t told;
static volatile int waits; /* a thread does */
static int paused;
static pthread_t waiter;
static volatile long waiter_tid;
static PyObject *at_end;

static void on_signal(int number) {
    told = 1;
    sem_post(&wake);
}

static void end(void) {
    signal(SIGTERM, SIG_DFL);
    kill(getpid(), SIGTERM);
}

static void *end_at_last(void *unused) {
    sleep(PATIENCE_S);
    end();
    return NULL;
}

static void *wait_for_signal(void *unused) {
    pthread_t other;
    waiter_tid = syscall(SYS_gettid);
    while (!told && waits) sem_wait(&wake);
    if (!told) return NULL;
    if (!pthread_create(&other, NULL, end_at_last, NULL)) pthread_detach(other);
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *done = PyObject_CallNoArgs(at_end);
    if (!done) PyErr_Clear();
    Py_XDECREF(done);
    PyGILState_Release(state);
    end();
    return NULL;
}

/* The thread that waits stays with the parent: without it the signal would be lost. */
static void in_forked_child(void) {
    struct sigaction now;
    waits = told = paused = 0;
    if (!sigaction(SIGTERM, NULL, &now) && now.sa_handler == on_signal) signal(SIGTERM, SIG_DFL);
}

static int begin_waiting(void) {
    waits = 1;
    int failed = pthread_create(&waiter, NULL, wait_for_signal, NULL);
    if (failed) waits = 0;
    return failed;
}

PyObject *before_termination(PyObject *self, PyObject *function) {
    static int watches_forks;
    struct sigaction now;
    if (waits || sigaction(SIGTERM, NULL, &now) || now.sa_handler != SIG_DFL) Py_RETURN_FALSE; /* the program answers it */
    if (!watches_forks && !pthread_atfork(NULL, NULL, in_forked_child)) watches_forks = 1;
    Py_INCREF(function);
    Py_XSETREF(at_end, function);
    if (!watches_forks || sem_init(&wake, 0, 0) || begin_waiting()) Py_RETURN_FALSE;
    signal(SIGTERM, on_signal);
    Py_RETURN_TRUE;
}

/* Around a fork: Python warns of one beside threads. A signal that comes meanwhile is answered after it. */
PyObject *termination_pause(PyObject *self, PyObject *unused) {
    if (!waits || told) Py_RETURN_NONE;
    Py_BEGIN_ALLOW_THREADS
    waits = 0, paused = 1;
    sem_post(&wake);
    join_thread(waiter, waiter_tid);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *termination_resume(PyObject *self, PyObject *unused) {
    if (paused) begin_waiting();
    paused = 0;
    Py_RETURN_NONE;
}
