/* A child that is told to end by SIGTERM, as a pool's workers are, writes what it recorded first; then it ends by that
   signal as it would have. Python does not know of this: for it SIGTERM has its default, and may be given a handler. */
#include "native.h"

#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <unistd.h>

#define PATIENCE_S 3 /* for the interpreter's lock, which may never come */

static sem_t told;
static PyObject *at_end;

static void on_signal(int number) { sem_post(&told); }

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
    while (sem_wait(&told)) {}
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
    if (!sigaction(SIGTERM, NULL, &now) && now.sa_handler == on_signal) signal(SIGTERM, SIG_DFL);
}

PyObject *before_termination(PyObject *self, PyObject *function) {
    static int watches_forks;
    struct sigaction now;
    pthread_t thread;
    if (sigaction(SIGTERM, NULL, &now) || now.sa_handler != SIG_DFL) Py_RETURN_FALSE; /* the program answers it */
    if (!watches_forks && !pthread_atfork(NULL, NULL, in_forked_child)) watches_forks = 1;
    Py_INCREF(function);
    Py_XSETREF(at_end, function);
    if (!watches_forks || sem_init(&told, 0, 0) || pthread_create(&thread, NULL, wait_for_signal, NULL)) Py_RETURN_FALSE;
    pthread_detach(thread);
    signal(SIGTERM, on_signal);
    Py_RETURN_TRUE;
}
