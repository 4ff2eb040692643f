/* vLLM's usual block hashes, sha256 of a pickle, at the speed of the digest itself.

   What is computed is written in blocks.py (`Hasher`), and tested to be the same: a block's digest is
   SHA-256(pickle.dumps((parent digest, token ids, None), 5)). Such a pickle has one form for ids of 32 bits, so that it
   is written here straight from the array of ids; Python would make an object of each id first. */

#define PY_SSIZE_T_CLEAN
#define OPENSSL_SUPPRESS_DEPRECATED /* EVP would look the algorithm up for every block */
#include <Python.h>
#include <openssl/sha.h>
#include <string.h>

#define FEWEST 4    /* pickle has forms of their own for tuples of three and less */
#define MOST 10000  /* longer pickles are framed in pieces */
#define SHORT 64    /* blocks for which it is not worth to let other threads have their turn */
#define HEAD (2 + 9 + 2 + SHA256_DIGEST_LENGTH + 2) /* protocol, frame, parent and its memo, mark */

static unsigned char *
put_id(unsigned char *to, unsigned int id)
{
    int size = id < 0x100 ? 1 : id < 0x10000 ? 2 : 4;
    *to++ = size == 1 ? 'K' : size == 2 ? 'M' : 'J';
    for (int i = 0; i < size; i++)
        *to++ = (unsigned char)(id >> 8 * i);
    return to;
}

/* `pickle` has room for HEAD, five bytes an id and TAIL. */
static void
digest(unsigned char *pickle, const unsigned char *parent, const int *ids, Py_ssize_t size, unsigned char *into)
{
    static const unsigned char begins[] = "\x80\x05\x95", tail[] = "t\x94N\x87\x94.";
    SHA256_CTX sha;
    unsigned char *to = pickle + HEAD;

    memcpy(pickle, begins, 3);
    pickle[11] = 'C';
    pickle[12] = SHA256_DIGEST_LENGTH;
    memcpy(pickle + 13, parent, SHA256_DIGEST_LENGTH);
    pickle[HEAD - 2] = 0x94;
    pickle[HEAD - 1] = '(';
    for (Py_ssize_t i = 0; i < size; i++)
        to = put_id(to, (unsigned int)ids[i]);
    memcpy(to, tail, sizeof tail - 1);
    to += sizeof tail - 1;
    unsigned long long framed = (unsigned long long)(to - pickle - 11);
    for (int i = 0; i < 8; i++)
        pickle[3 + i] = (unsigned char)(framed >> 8 * i);
    SHA256_Init(&sha);
    SHA256_Update(&sha, pickle, (size_t)(to - pickle));
    SHA256_Final(into, &sha);
}

static void
digest_all(unsigned char *pickle, const unsigned char *parent, const int *ids, Py_ssize_t blocks, Py_ssize_t size,
           unsigned char *into)
{
    for (Py_ssize_t i = 0; i < blocks; i++) {
        digest(pickle, parent, ids + i * size, size, into);
        parent = into;
        into += SHA256_DIGEST_LENGTH;
    }
}

PyDoc_STRVAR(sha256_doc,
"sha256(parent, ids, block_size)\n--\n\n"
"The digests, one after the other, of the full blocks of `ids`, a buffer of 32-bit integers, behind `parent`.\n\n"
"Raises ValueError for sizes of blocks that are pickled otherwise, and for a parent of another length.");

static PyObject *
sha256(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Py_buffer ids;
    Py_ssize_t size, blocks;
    PyObject *digests = NULL;
    unsigned char *pickle = NULL;

    if (count != 3 || !PyBytes_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "expected the parent's digest, ids and the size of a block");
        return NULL;
    }
    if ((size = PyLong_AsSsize_t(args[2])) == -1 && PyErr_Occurred())
        return NULL;
    if (size < FEWEST || size > MOST || PyBytes_GET_SIZE(args[0]) != SHA256_DIGEST_LENGTH) {
        PyErr_Format(PyExc_ValueError, "expected a digest of %d bytes and blocks of %d to %d ids",
                     SHA256_DIGEST_LENGTH, FEWEST, MOST);
        return NULL;
    }
    if (PyObject_GetBuffer(args[1], &ids, PyBUF_FORMAT | PyBUF_ND) < 0)
        return NULL;
    if (ids.itemsize != sizeof(int) || ids.format == NULL || strcmp(ids.format, "i") != 0) {
        PyErr_SetString(PyExc_TypeError, "expected a buffer of 32-bit integers");
        goto done;
    }
    blocks = ids.len / (Py_ssize_t)sizeof(int) / size;
    digests = PyBytes_FromStringAndSize(NULL, blocks * SHA256_DIGEST_LENGTH);
    pickle = PyMem_Malloc((size_t)(HEAD + 5 * size + 16));
    if (digests == NULL || pickle == NULL) {
        Py_CLEAR(digests);
        PyErr_NoMemory();
        goto done;
    }
    const unsigned char *parent = (const unsigned char *)PyBytes_AS_STRING(args[0]);
    unsigned char *into = (unsigned char *)PyBytes_AS_STRING(digests);
    if (blocks <= SHORT)
        digest_all(pickle, parent, ids.buf, blocks, size, into);
    else {
        Py_BEGIN_ALLOW_THREADS
        digest_all(pickle, parent, ids.buf, blocks, size, into);
        Py_END_ALLOW_THREADS
    }
done:
    PyMem_Free(pickle);
    PyBuffer_Release(&ids);
    return digests;
}

static PyMethodDef functions[] = {
    {"sha256", (PyCFunction)(void (*)(void))sha256, METH_FASTCALL, sha256_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "router.prompt.digests",
    .m_doc = "vLLM's usual block hashes.",
    .m_size = 0,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit_digests(void)
{
    return PyModuleDef_Init(&module);
}
